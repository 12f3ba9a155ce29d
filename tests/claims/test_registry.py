"""The claims: their words are those of the facts, and naming them costs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import pytest

from qkv.claims.registry import CLAIMS, chosen
from qkv.errors import RequestError

# expectations from the literature that were written down here, before anything was measured
PINNED = {
    "H28": "3acbf2cefa78c12d",
    "H29": "a12516252c3d770b",
    "H30": "137406c03d88ad1b",
    "H31": "5aecd7936bcdabbf",
    "H32": "b0baa2549ab2c939",
    "H33": "4ac0d194d46b4b19",
    "H34": "fc85a2fe40423a7e",
    "H35": "deec0b43041c5d7d",
    "H36": "14cd8705ea9bfb9c",
}


@pytest.mark.parametrize("name", CLAIMS)
def test_the_expectation_is_word_for_word_what_was_written_before(name: str, shared_folder: Path) -> None:
    """All of the line, or all that follows "Expect:"; of those that are not there, what is pinned here."""
    claim = CLAIMS[name]
    if claim.number in PINNED:
        assert sha256(claim.expectation.encode()).hexdigest()[:16] == PINNED[claim.number]
        return
    lines = (shared_folder / "facts.md").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith(f"{claim.number} ")]
    whole = line.removeprefix(f"{claim.number} ")
    assert claim.expectation in (whole, whole.partition("Expect:")[2].strip())


@pytest.mark.parametrize("name", CLAIMS)
def test_an_experiment_has_what_the_frame_calls(name: str) -> None:
    spec = find_spec(CLAIMS[name].module)
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    defined = {part.name: part for part in tree.body if isinstance(part, ast.FunctionDef)}
    assert {"measure", "judge"} <= set(defined)
    assert [argument.arg for argument in defined["measure"].args.args] == ["run"]
    assert ast.get_docstring(tree), "it says what is measured, and what was changed on the way"


def test_names_are_once_each_and_in_the_order_of_the_numbers() -> None:
    numbers = [int(claim.number[1:]) for claim in CLAIMS.values()]
    assert numbers == sorted(numbers)
    assert all(name == claim.name == name.lower() for name, claim in CLAIMS.items())
    assert len({claim.experiment for claim in CLAIMS.values()}) == len(CLAIMS)


def test_claims_are_chosen_by_name_by_number_or_all_and_once_each() -> None:
    assert [claim.name for claim in chosen(["H16", "word-order", "mask-leak"])] == ["mask-leak", "word-order"]
    assert [claim.name for claim in chosen(["all", "h9"])] == list(CLAIMS)


def test_an_unknown_name_is_refused_with_one_that_is_near() -> None:
    with pytest.raises(RequestError, match=r"There is no claim 'word-oder'; did you mean word-order\?"):
        chosen(["word-order", "word-oder"])
    with pytest.raises(RequestError, match=f"there are {next(iter(CLAIMS))}, "):
        chosen(["H99"])


def test_the_list_imports_no_torch() -> None:
    code = (
        "import atexit, sys; from qkv import cli; sys.argv = ['qkv', 'reproduce', '--list'];"
        "atexit.register(lambda: print('torch' in sys.modules)); cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[-1] == "False" and [line.split()[0] for line in lines[:-1]] == list(CLAIMS)
