"""What changes a fingerprint, and what does not."""

from __future__ import annotations

import pytest

from qkv.claims.claim import Claim
from qkv.claims.fingerprint import _reached, fingerprint
from qkv.errors import SourceError
from tests.claims.made_up import Bench

CODE = '''
"""About it."""
from qkv.claims import tasks
from qkv.claims.claim import Figures, Run
from qkv.claims.judging import within
from qkv.claims.training import windows

STEPS = 10
BOUND = 3


def measure(run: Run) -> Figures:
    """All of it."""
    return {"value": helper(STEPS)}


def helper(steps):
    inner = lambda: tasks.recall
    return steps + 1, windows


def judge(figures):
    return within("w", figures, BOUND)


def draw(figures):
    return {}
'''


def of(bench: Bench, code: str) -> str:
    claim: Claim = bench.write("printed", code)
    return fingerprint(claim.module)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("STEPS = 10", "STEPS = 11"),
        ("steps + 1", "steps + 2"),
        ('"value"', '"other"'),
        ("import windows", "import warm_up as windows"),
        ("tasks.recall", "tasks.ragged"),
    ],
)
def test_what_a_measurement_reaches_changes_it(bench: Bench, old: str, new: str) -> None:
    assert CODE.replace(old, new) != CODE
    assert of(bench, CODE) != of(bench, CODE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("BOUND = 3", "BOUND = 4"),
        ("run: Run", "run"),
        ("-> Figures", "-> Run"),
        ("def helper(steps)", "def helper(steps: Figures)"),
        ('"w"', '"what"'),
        ("return {}", 'return {"more": ""}'),
        ('"""All of it."""', '"""Otherwise said."""'),
        ('"""About it."""', '"""About this."""'),
        ("return steps + 1, windows", "return steps  +  1, windows  # why"),
        ("def draw", "def unused():\n    return 1\n\n\ndef draw"),
    ],
)
def test_judges_pictures_and_words_do_not(bench: Bench, old: str, new: str) -> None:
    assert CODE.replace(old, new) != CODE
    assert of(bench, CODE) == of(bench, CODE.replace(old, new))


def test_it_follows_names_into_the_shared_modules_and_no_further(bench: Bench) -> None:
    claim = bench.write("printed", CODE)
    assert set(_reached(claim.module, "helper")) == {
        ("qkv.claims.tasks", "recall"),
        ("qkv.claims.training", "windows"),
    }
    assert set(_reached(claim.module, "measure")) == {
        (claim.module, "helper"),
        (claim.module, "STEPS"),
    }


def test_an_experiment_without_a_measurement_is_refused(bench: Bench) -> None:
    claim = bench.write("printed", "def judge(figures):\n    return ()\n")
    with pytest.raises(SourceError, match=r"made_up_printed does not define measure\."):
        fingerprint(claim.module)
