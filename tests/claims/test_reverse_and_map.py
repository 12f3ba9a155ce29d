"""H8: the judge both ways, the task by hand, and the checkpoints that count."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from qkv.claims.claim import Figures, Run
from qkv.claims.experiments import reverse_and_map
from qkv.claims.experiments.reverse_and_map import (
    CLASSES,
    LAST,
    Checkpoints,
    judge,
    made,
    model_of,
    names,
    trained,
)
from qkv.claims.translating import END, FIRST, START
from qkv.lineage.transformer import averaged, smoothing_floor


def figures() -> Figures:
    return {
        "floor": smoothing_floor(CLASSES, 0.1),
        "smoothed": {"exact": 0.998, "nll": 0.11, "smoothed": 0.8, "curve": {"losses": [2.0, 0.81]}},
        "plain": {"exact": 0.997, "nll": 0.002, "smoothed": 3.0, "curve": {"losses": [1.0, 0.01]}},
    }


def test_all_holds_of_figures_as_expected() -> None:
    checks = judge([figures()] * 3)
    assert len(checks) == 7 and all(check.holds for check in checks)


@pytest.mark.parametrize(
    ("name", "what", "value", "words"),
    [
        ("plain", "exact", 0.98, "without smoothing more than 99 %"),
        ("smoothed", "nll", 0.001, "higher negative log-likelihood"),
        ("smoothed", "exact", 0.991, "half a point"),
        ("smoothed", "smoothed", 0.84, "at most 0.05 nats above"),
        ("smoothed", "smoothed", 0.77, "below its floor"),
        ("smoothed", "curve", {"losses": [0.7, 0.9]}, "below its floor"),
    ],
)
def test_one_seed_that_is_otherwise_is_enough(name: str, what: str, value: object, words: str) -> None:
    wrong = deepcopy(figures())
    wrong[name][what] = value
    failed = [check.what for check in judge([figures(), wrong]) if not check.holds]
    assert len(failed) == 1 and words in failed[0]


def test_a_smoothed_model_that_is_not_exact_fails_twice() -> None:
    wrong = figures()
    wrong["smoothed"]["exact"] = 0.9
    assert sum(not check.holds for check in judge([figures(), wrong])) == 2


def test_the_floor_is_that_of_a_hundred_classes() -> None:
    wrong = figures()
    wrong["floor"] = smoothing_floor(CLASSES + 1, 0.1)
    assert not judge([wrong])[4].holds and judge([figures()])[4].measured == "0.7778"


def test_a_row_is_said_backwards_and_each_symbol_by_its_other() -> None:
    other = names(torch.Generator().manual_seed(0))
    assert sorted(other.tolist()) == list(range(CLASSES + 1)) and other[:FIRST].tolist() == [0, 1, 2]
    pairs = made(torch.Generator().manual_seed(1), 50, other)
    for source, target in zip(pairs.source.tolist(), pairs.target.tolist(), strict=True):
        said = [int(other[token]) for token in reversed(source) if token]
        assert [token for token in target if token] == [START, *said, END]


def test_the_weights_are_the_mean_of_the_last_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Checkpoints] = []

    class Seen(Checkpoints):
        def __init__(self, *given: object):
            super().__init__(*given)  # type: ignore[arg-type]
            kept.append(self)

    monkeypatch.setattr(reverse_and_map, "Checkpoints", Seen)
    monkeypatch.setattr(reverse_and_map, "BATCH", 2)
    run = Run("reverse-and-map", 0, "smoke")
    model = model_of(run)
    trained(run, model, names(run.generator("names")), "plain", 0.0)
    assert len(kept[0].kept) == 3 and LAST == 5
    mean = averaged(kept[0].kept)
    assert all(torch.equal(value, mean[name]) for name, value in model.state_dict().items())
    last = kept[0].kept[-1]
    assert not all(torch.equal(value, last[name]) for name, value in model.state_dict().items())


def test_no_more_checkpoints_are_kept_than_count() -> None:
    linear = torch.nn.Linear(1, 1)
    told: list[int] = []
    kept = Checkpoints(linear, lambda done, total, note="": told.append(done))  # type: ignore[arg-type]
    for step in range(1, LAST + 3):
        torch.nn.init.constant_(linear.weight, step)
        kept(step, 9)
    assert told == list(range(1, LAST + 3))
    assert [float(state["weight"]) for state in kept.kept] == [3, 4, 5, 6, 7]
