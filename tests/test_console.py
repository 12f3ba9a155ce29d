"""What is said beside the output of a command."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.status import Status

from qkv import cli, console
from tests.engine.tiny import save_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_llama(path)
    return path


LINES = '{"prompt": "ABC", "max_new_tokens": 1}\n"hello"\n'


def generated(folder: Path, *arguments: object) -> Result:
    asked = ["generate", "-m", folder, "-n", 3, "--ignore-eos", "--overwrite", *arguments]
    return CliRunner().invoke(cli.app, list(map(str, asked)), input=LINES)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of progress, where every look at the clock takes a second."""
    at, seen = iter(range(100_000)), list[str]()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(at)))
    monkeypatch.setattr(Status, "update", lambda status, text: seen.append(text))
    monkeypatch.setattr(Status, "start", lambda status: None)
    return seen


@pytest.mark.parametrize(("source", "of"), [("prompts.jsonl", " of 2"), ("-", "")])
def test_lines_are_counted_on_a_terminal(
    folder: Path, tmp_path: Path, shown: list[str], source: str, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many there will be is not known of standard input. The first is done after one of three steps."""
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text(LINES)
    assert generated(folder, "--input", source, "--output", "out").exit_code == 0 and shown == []
    monkeypatch.setattr(type(console.notes()), "is_terminal", True)
    assert generated(folder, "--input", source, "--output", "out").exit_code == 0
    counted = [text.removesuffix(" tokens/s").split(" lines, ") for text in shown if "generating" in text]
    assert [where for where, _ in counted] == [f"generating: {done}{of}" for done in (0, 1, 1)]
    assert all(float(speed) > 0 for _, speed in counted)
