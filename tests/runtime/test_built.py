"""The C++ runtime: here where it has to be, and named as it is."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest

from qkv.runtime import built

ANY = {"portable"}
SETS = {
    "x86_64": {"amx", "avx512", "avx2"} | ANY,
    "AMD64": {"amx", "avx512", "avx2"} | ANY,
    "aarch64": {"neon"} | ANY,
    "arm64": {"neon"} | ANY,
}


def test_the_native_runtime_is_here_where_it_is_required() -> None:
    if os.environ.get("QKV_REQUIRE_NATIVE") == "1":
        assert built.missing() is None
        sets = import_module(built.NAME).instruction_sets()
        assert sets[-1] == "portable" and set(sets) <= SETS.get(platform.machine(), ANY)


def raising(problem: ImportError) -> Callable[[str], ModuleType]:
    def load(name: str) -> ModuleType:
        raise problem

    return load


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (
            ModuleNotFoundError("No module named 'qkv.runtime._native'", name="qkv.runtime._native"),
            "it was not built when qkv was installed, for which a C++20 compiler is needed",
        ),
        (
            ModuleNotFoundError("No module named 'other'", name="other"),
            "it needs other, which is not installed",
        ),
        (
            ImportError("libstdc++.so.6: cannot open shared object file."),
            "it cannot be loaded: libstdc++.so.6: cannot open shared object file",
        ),
    ],
    ids=["not built", "needs", "damaged"],
)
def test_a_missing_runtime_says_why(
    problem: ImportError, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(built, "import_module", raising(problem))
    assert built.missing() == reason
    assert built.status() == f"no native runtime: {reason}"


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (None, "native avx2"),
        ("", "native avx2"),
        ("portable", "native portable"),
        ("neon", "no native runtime: QKV_ISA names 'neon', and here are avx2, portable"),
    ],
)
def test_the_status_names_the_instruction_set(
    asked: str | None, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(instruction_sets=lambda: ["avx2", "portable"])
    monkeypatch.setattr(built, "import_module", lambda name: module)
    monkeypatch.delenv("QKV_ISA", raising=False)
    if asked is not None:
        monkeypatch.setenv("QKV_ISA", asked)
    assert built.status() == status


def test_telling_it_imports_no_numpy() -> None:
    code = "import sys; from qkv.runtime.built import status; status(); sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
