"""Verdicts, runs and checks, by hand."""

from __future__ import annotations

import pytest
import torch

from qkv.claims.claim import Check, Run, verdict
from qkv.claims.judging import below, spread, within
from qkv.errors import RequestError


def check(what: str, holds: bool) -> Check:
    return Check(what, "1", holds)


def test_the_verdict_follows_from_the_checks() -> None:
    assert verdict([check("a", True), check("b", True)]) == "holds"
    assert verdict([check("a", False), check("b", False)]) == "fails"
    assert verdict([check("a", False)]) == "fails"
    assert (
        verdict([check("a", True), check("b rises", False), check("c", False)])
        == 'holds only in part: not "b rises", not "c"'
    )
    with pytest.raises(RequestError, match="no verdict"):
        verdict([])


def test_a_run_has_two_sizes() -> None:
    assert Run("x", 0).of(1500, 20) == 1500
    assert Run("x", 0, "smoke").of(1500, 20) == 20


def test_random_numbers_depend_on_claim_seed_and_name_alone() -> None:
    def drawn(claim: str, seed: int, name: str) -> list[int]:
        return torch.randint(1 << 30, (4,), generator=Run(claim, seed).generator(name)).tolist()

    first = drawn("x", 0, "batches")
    assert first == drawn("x", 0, "batches")
    others = [drawn("y", 0, "batches"), drawn("x", 1, "batches"), drawn("x", 0, "weights")]
    assert all(other != first for other in others)


def test_progress_is_told_to_whom_it_concerns() -> None:
    heard: list[tuple[int, int, str]] = []
    Run("x", 0, report=lambda done, total, note="": heard.append((done, total, note))).progress(1, 3, "a")
    Run("x", 0).progress(1, 3)
    assert heard == [(1, 3, "a")]


def test_a_spread_is_the_median_and_its_ends() -> None:
    assert spread([1.0, 3.0, 2.5], ".1f", " nats") == "2.5 nats (1.0 to 3.0)"
    assert spread([0.25]) == "0.25"
    assert spread([1.0, None, 3.0]) == "2 (1 to 3), 1 of 3 diverged"
    assert spread([None, None]) == "diverged" and spread([None], none="nowhere") == "nowhere"


@pytest.mark.parametrize(
    ("lower", "upper", "by", "holds"),
    [
        ([1.0, 2.0], [1.5, 2.5], 1.0, True),
        ([1.0, 2.0], [1.5, 2.0], 1.0, False),  # not in the second seed
        ([1.0, 2.0], [1.5, 2.5], 2.0, False),
        ([1.0, 2.0], [2.5, 4.5], 2.0, True),
        ([1.0], [None], 1.0, True),  # what diverged is above everything
        ([None], [1.0], 1.0, False),
        ([None], [None], 1.0, False),
    ],
)
def test_below_in_every_seed(
    lower: list[float | None], upper: list[float | None], by: float, holds: bool
) -> None:
    found = below("a is below b", lower, upper, by=by)
    assert found.holds == holds and found.measured == f"{spread(lower)} against {spread(upper)}"


def test_within_in_every_seed() -> None:
    assert within("w", [1.0, 2.0], 1, 2).holds
    assert not within("w", [1.0, 2.1], 1, 2).holds
    assert not within("w", [0.9, 2.0], low=1).holds
    assert not within("w", [1.0, None], 0, 2).holds
