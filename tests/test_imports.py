"""Imports go downwards only, in the order of the house; some parts never import torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "qkv"

# from the ground up; a part may import itself and what stands before it
HOUSE = [
    "errors", "memory", "sources", "spec", "families", "generation_config", "checkpoints", "text",
    "inspection", "planning", "nn", "runtime", "loading", "conversion", "engine", "model", "explanation",
    "context", "train", "lineage", "serve", "claims", "cli",
]  # fmt: skip
ONLY = {"lineage": {"errors", "spec", "nn", "lineage"}}
FILES = sorted(SOURCE.rglob("*.py"))


def imported_parts(file: Path) -> set[str]:
    """Parts of qkv that a file imports anywhere, inside functions and for typing too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name}: imports are absolute"
            modules = [node.module or ""]
            if node.module == "qkv":
                modules = [f"qkv.{alias.name}" for alias in node.names]
        found |= {m.split(".")[1] for m in modules if m.startswith("qkv.")}
    return found


def test_every_part_has_a_place_in_the_order() -> None:
    parts = {
        path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert parts - {"__init__", "py"} <= set(HOUSE)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_go_downwards(file: Path) -> None:
    part = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    if part == "__init__":
        return  # the front door names what is inside, lazily
    allowed = ONLY.get(part, set(HOUSE[: HOUSE.index(part) + 1]))
    upward = {name for name in imported_parts(file) if name in HOUSE} - allowed
    assert not upward, f"{part} imports {upward}, which stand above it"


@pytest.mark.parametrize(
    "module",
    [
        "qkv",
        "qkv.spec",
        "qkv.families",
        "qkv.checkpoints",
        "qkv.text",
        "qkv.inspection",
        "qkv.runtime",
        "qkv.cli",
    ],
)
def test_torch_is_not_imported_by(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_no_package_hides_a_function_of_the_same_name() -> None:
    import qkv

    for name in qkv.__all__:
        if name.islower() and not name.startswith("_"):
            assert not (SOURCE / name).exists() and not (SOURCE / f"{name}.py").exists(), name
