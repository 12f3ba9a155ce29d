"""Experiments that tests write into files of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from qkv.claims import experiments, fingerprint, registry
from qkv.claims.claim import Claim

HEAD = "from qkv.claims.claim import Check\n"
COUNTS = (
    HEAD
    + """
def measure(run):
    with open({log!r}, "a") as log:
        log.write(f"{{run.seed}} {{run.size}}\\n")
    return {{"value": run.of(10, 1) + run.seed}}

def judge(figures):
    values = [each["value"] for each in figures]
    return (Check("the values rise", str(values), values == sorted(values)),)
"""
)


class Bench:
    """A folder of made-up experiments, which are the only claims while a test runs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.monkeypatch = folder, monkeypatch
        self.claims: dict[str, Claim] = {}
        self.log = folder / "log.txt"
        monkeypatch.setattr(experiments, "__path__", [*experiments.__path__, str(folder)])
        monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a file changes within a second

    def write(self, name: str, code: str = COUNTS) -> Claim:
        """A claim of this name, whose experiment has this code; the same name again replaces it."""
        module = "made_up_" + name.replace("-", "_")
        (self.folder / f"{module}.py").write_text(code.format(log=str(self.log)) if code is COUNTS else code)
        sys.modules.pop(f"qkv.claims.experiments.{module}", None)
        for cached in (fingerprint._tree, fingerprint._definitions, fingerprint._imports):
            cached.cache_clear()
        claim = Claim(
            name=name,
            number=f"X{len(self.claims)}",
            statement="Values <rise>.",
            source="Nobody 2000",
            expectation="They | rise.",
            experiment=module,
        )
        self.claims[name] = claim
        self.monkeypatch.setattr(registry, "_CLAIMS", tuple(self.claims.values()))
        return claim

    def ran(self) -> list[str]:
        """The seed and size of every measurement since the last call."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines
