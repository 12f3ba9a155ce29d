"""Orders that draws bear out, both ways, for one seed and several."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

import pytest

from qkv.claims.claim import Figures
from qkv.claims.ranking import above, draw, gap_grows, keeps_more, near, not_below, one_seed
from tests.claims.translated import figures


def both(a: Sequence[float], b: Sequence[float], sure: int = 100) -> Figures:
    """Systems a and b with these BLEU in two buckets; so many of 100 draws are as they are."""
    return figures({"a": a, "b": b}, sure)


@pytest.mark.parametrize(("sure", "holds"), [(95, True), (94, False)])
def test_above_needs_95_of_100_draws(sure: int, holds: bool) -> None:
    for metric in ("bleu", "chrf"):
        check = above("a is above b", [both((20, 20), (10, 10), sure)], "a", "b", metric)
        assert check.holds is holds and f"above in {sure}% of draws" in check.measured
        assert "20.0 against 10.0" in check.measured
    assert not above("b", [both((20, 20), (10, 10))], "b", "a").holds


@pytest.mark.parametrize(("sure", "holds"), [(95, False), (94, True)])
def test_not_below_is_refuted_by_95_of_100_draws(sure: int, holds: bool) -> None:
    assert not_below("a", [both((10, 10), (20, 20), sure)], "a", "b").holds is holds
    assert not_below("b", [both((10, 10), (20, 20), sure)], "b", "a").holds


@pytest.mark.parametrize(("last", "holds"), [(9, True), (11, False)])
def test_a_gap_grows_from_the_first_bucket_to_the_last(last: float, holds: bool) -> None:
    check = gap_grows("grows", [both((30, 20), (20, last))], "a", "b")
    assert check.holds is holds
    assert check.measured.startswith(f"{20 - last:.1f} BLEU on the longest against 10.0 on the shortest")


@pytest.mark.parametrize(("last", "holds"), [(13, True), (14, False)])
def test_what_is_kept_is_a_share_of_the_first_bucket(last: float, holds: bool) -> None:
    """20 of 30 are kept by a; 13 of 20 are less and 14 of 20 are more."""
    check = keeps_more("keeps", [both((30, 20), (20, last))], "a", "b")
    assert check.holds is holds and check.measured.startswith("67% of its BLEU")
    assert not keeps_more("nothing", [both((0, 0), (20, 10))], "a", "b").holds


def test_near_is_near_on_either_side() -> None:
    for apart, holds in ((3, True), (-3, True), (3.2, False), (-3.2, False)):
        assert near("near", [both((10 + apart, 10 + apart), (10, 10))], "a", "b", 3).holds is holds


def test_every_seed_counts() -> None:
    good, bad = both((30, 20), (20, 5)), both((20, 5), (30, 20))
    for judge in (above, not_below, gap_grows, keeps_more):
        assert judge("x", [good, good], "a", "b").holds and not judge("x", [good, bad], "a", "b").holds


def test_a_system_that_diverged_is_below_all_others() -> None:
    lost = both((30, 20), (20, 5))
    lost["systems"]["b"] = {"parameters": 1, "curve": lost["systems"]["b"]["curve"]}
    assert above("x", [lost], "a", "b").holds and "diverged" in above("x", [lost], "a", "b").measured
    for judge in (above, not_below, gap_grows, keeps_more):
        assert not judge("x", [lost], "b", "a").holds
    assert not gap_grows("x", [lost], "a", "b").holds and not keeps_more("x", [lost], "a", "b").holds
    assert not near("x", [lost], "a", "b", 100).holds
    lost["systems"]["a"] = lost["systems"]["b"]
    assert not any(judge("x", [lost], "a", "b").holds for judge in (above, not_below, gap_grows, keeps_more))
    ElementTree.fromstring(draw([lost])["length"])


def test_one_seed_does_not_claim_three() -> None:
    assert not one_seed().holds and "not measured" in one_seed().measured


def test_the_picture_has_a_curve_a_system() -> None:
    drawn = draw([both((30, 20), (20, 5))])
    assert set(drawn) == {"length", "loss"}
    assert drawn["length"].count('class="curve') == 2 * 4  # two systems, two scores, curve and legend
    assert "BLEU by length" in drawn["length"] and "chrF by length" in drawn["length"]
