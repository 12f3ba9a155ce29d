"""H11: the judge both ways, and who can be asked beyond what it was trained on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from qkv import spec
from qkv.claims.claim import Figures
from qkv.claims.experiments.extrapolation import LENGTH, LENGTHS, SCHEMES, STEADY, judge, refused

RISES = {"learned": 0.9, "sinusoidal": 0.6, "rotary": 0.3, "none": 0.2, **dict.fromkeys(STEADY, 0.01)}


def figures() -> Figures:
    """A loss that is at 128 where it stays."""
    found: Figures = {"lengths": list(LENGTHS), "refused": "Position 64 has no row."}
    for name, rise in RISES.items():
        sliding = [2.0 + (rise if length >= 128 else 0) for length in LENGTHS]
        found[name] = {"sliding": sliding, "pieces": [2.1 - 0.01 * i for i in range(len(LENGTHS))]}
    return found


def test_all_holds_of_figures_as_expected() -> None:
    checks = judge([figures()] * 3)
    assert len(checks) == 12 and all(check.holds for check in checks)


def flat(name: str) -> Callable[[Figures], None]:
    def change(found: Figures) -> None:
        found[name]["sliding"] = [2.0] * len(LENGTHS)

    return change


def sags(name: str, by: float) -> Callable[[Figures], None]:
    def change(found: Figures) -> None:
        found[name]["sliding"][2] = 2.0 + by

    return change


def taken(found: Figures) -> None:
    found["refused"] = None


def pieces_rise(found: Figures) -> None:
    found["ALiBi"]["pieces"][-1] = 2.2


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        (taken, ["a learned table refuses"]),
        (flat("learned"), ["learned, sliding"]),
        (flat("sinusoidal"), ["sinusoidal breaks:", "sinusoidal breaks first"]),
        (flat("rotary"), ["rotary breaks", *("rotary is next",) * 3]),
        *((sags(name, by), [f"{name} is flat"]) for name in STEADY for by in (0.06, -0.06)),
        (pieces_rise, ["ALiBi falls"]),
    ],
)
def test_what_is_otherwise_in_one_seed_fails(change: Callable[[Figures], None], failed: list[str]) -> None:
    wrong = figures()
    change(wrong)
    found = [check.what for check in judge([wrong, figures()]) if not check.holds]
    assert len(found) == len(failed)
    assert all(what.startswith(start) for what, start in zip(found, failed, strict=True))


def test_rotary_that_breaks_before_sinusoidal_fails() -> None:
    wrong = figures()
    wrong["rotary"]["sliding"] = [2.0, 2.0, 2.0, 2.7, 2.7, 2.7]
    failed = [check.what for check in judge([figures(), wrong]) if not check.holds]
    assert failed == ["sinusoidal breaks first: sliding, at 128 it has risen by more than rotary"]


def test_a_table_of_64_rows_refuses_position_64() -> None:
    assert refused(11) == "Position 64 has no row: this model's table ends at 64."


def test_all_buckets_and_clipped_distances_are_trained() -> None:
    buckets, shaw = SCHEMES["T5"], SCHEMES["Shaw"]
    assert isinstance(buckets, spec.Buckets) and max(buckets.starts()) < LENGTH
    assert not buckets.bidirectional
    assert isinstance(shaw, spec.Shaw) and shaw.clip < LENGTH
