"""Imports go downwards only, in the order of the house; some parts never import torch."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import qkv
from qkv.runtime.built import missing
from tests.engine.tiny import save_llama

SOURCE = Path(__file__).resolve().parent.parent / "src" / "qkv"

# from the ground up; a part may import itself and what stands before it
HOUSE = [
    "errors", "memory", "kept", "sources", "spec", "families", "generation_config", "checkpoints", "text",
    "inspection", "charts", "planning", "nn", "runtime", "loading", "conversion", "engine", "model",
    "verification", "benching", "explanation", "context", "train", "lineage", "serve", "claims", "console",
    "options", "commands", "cli",
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
        "qkv.charts",
        "qkv.planning",
        "qkv.runtime",
        "qkv.runtime.choice",
        "qkv.runtime.machine",
        "qkv.loading",
        "qkv.conversion",
        "qkv.engine",
        "qkv.engine.files",
        "qkv.engine.scheduler",
        "qkv.engine.serving",
        "qkv.model",
        "qkv.verification",
        "qkv.benching",
        "qkv.claims",
        "qkv.claims.pages",
        "qkv.explanation",
        "qkv.cli",
    ],
)
def test_torch_is_not_imported_by(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def without_torch(*lines: str, **environment: str) -> dict[str, Any]:
    """What a program prints, as JSON, in a process that cannot import torch."""
    code = "\n".join(("import json, sys", 'sys.modules["torch"] = None', "import qkv", *lines))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_llama(path)
    return path


RUNTIMES = ["numpy"] + ["native"] * (missing() is None)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_model_generates_and_chats_where_there_is_no_torch(folder: Path, runtime: str) -> None:
    found = without_torch(
        f'model = qkv.load({str(folder)!r}, runtime="{runtime}")',
        'done = model.generate("ABC hello", max_new_tokens=12, ignore_eos=True)',
        'text = "".join(model.stream("ABC hello", max_new_tokens=12, ignore_eos=True))',
        'both = model.generate([[1, 2], [3]], n=2, seed=1, max_new_tokens=3, ignore_eos=True)',
        'turn = model.chat([{"role": "user", "content": "hi"}])',
        'said = model.generate(turn, max_new_tokens=4, ignore_eos=True)',
        'print(json.dumps([repr(model), done.tokens, done.text, text, turn, said.tokens,'
        ' [[each.tokens for each in row] for row in both]]))',
    )  # fmt: skip
    model = qkv.load(folder, runtime="torch")
    done: Any = model.generate("ABC hello", max_new_tokens=12, ignore_eos=True)
    turn = model.chat([{"role": "user", "content": "hi"}])
    said: Any = model.generate(turn, max_new_tokens=4, ignore_eos=True)
    both: Any = model.generate([[1, 2], [3]], n=2, seed=1, max_new_tokens=3, ignore_eos=True)
    name = f"<{folder.name}: {model.spec.parameters():,} parameters, run by {runtime}>"
    assert found == [
        *(name, done.tokens, done.text, done.text, turn, said.tokens),
        [[each.tokens for each in row] for row in both],
    ]


def test_without_torch_the_best_of_the_others_is_taken(folder: Path) -> None:
    lines = (f"model = qkv.load({str(folder)!r})", "print(json.dumps([model.runtime]))")
    assert without_torch(*lines) == RUNTIMES[-1:]
    assert without_torch(*lines, QKV_RUNTIME="numpy") == ["numpy"]


def test_what_needs_torch_says_how_to_have_it(folder: Path) -> None:
    """One sentence each, and the model goes on."""
    found = without_torch(
        f'model, said = qkv.load({str(folder)!r}, runtime="numpy"), []',
        "def tapped():",
        '    with model.tap("final"): pass',
        'for call in (lambda: model([[1]]), tapped, lambda: model.network, lambda: model.save("x"),',
        '             lambda: model.use("sdpa"), lambda: model.generate("A", features=[1]),',
        f'             lambda: qkv.load({str(folder)!r}, runtime="torch"),',
        f'             lambda: qkv.load({str(folder)!r}, dtype="bfloat16"),',
        f'             lambda: qkv.load({str(folder)!r}, device="cuda")):',
        "    try: call()",
        "    except qkv.QkvError as problem: said.append(str(problem))",
        'print(json.dumps([said, len(model.generate("A", max_new_tokens=2, ignore_eos=True).tokens)]))',
    )
    whats = [
        "This", "A tap", "This", "Saving a model", "This", "Reading images or audio",
        "The torch runtime (runtime names it)", "The torch runtime (dtype bfloat16 is asked for)",
        "device 'cuda'",
    ]  # fmt: skip
    needs = 'needs torch, which is not installed: pip install "qkv[torch]".'
    assert found == [[f"{what} {needs}" for what in whats], 2]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_commands_import_no_torch(folder: Path, runtime: str) -> None:
    """Not even where it is installed."""
    arguments = ["generate", "-m", str(folder), "ABC", "-n", "3", "--ignore-eos", "--runtime", runtime]
    code = (
        "import atexit, sys; from qkv import cli; sys.argv = ['qkv', *sys.argv[1:]];"
        "atexit.register(lambda: print('torch' in sys.modules)); cli.main()"
    )
    for given, stdin in ((arguments, ""), (["chat", "-m", str(folder), "--runtime", runtime], "hi")):
        done = subprocess.run(
            [sys.executable, "-c", code, *given], input=stdin, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "False"


def test_no_package_hides_a_function_of_the_same_name() -> None:
    for name in qkv.__all__:
        if name.islower() and not name.startswith("_"):
            assert not (SOURCE / name).exists() and not (SOURCE / f"{name}.py").exists(), name
