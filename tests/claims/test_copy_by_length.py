"""H2: the judge both ways, the two tasks in one batch, and what counts as looking at the right place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qkv.claims.claim import Figures
from qkv.claims.experiments.copy_by_length import (
    BUCKETS,
    LONGEST,
    TASKS,
    VOCAB,
    framed,
    judge,
    mixed,
    on_the_line,
    wanted,
)
from qkv.claims.tasks import Ragged, ragged
from qkv.claims.translating import END, FIRST, START


def figures() -> Figures:
    falls = [0.9, 0.5, 0.2, 0.0, 0.0, 0.0]
    exact = {f"search, {task}": [0.99] * len(BUCKETS) for task in TASKS}
    return {
        "exact": exact | {f"encdec, {task}": falls for task in TASKS},
        "steep": dict.fromkeys(TASKS, 0.95),
    }


def failed(*seeds: Figures) -> list[str]:
    return [check.what for check in judge(seeds) if not check.holds]


def test_all_holds_of_figures_as_expected() -> None:
    assert len(judge([figures()] * 3)) == len(TASKS) * (len(BUCKETS) + 1 + 3 + 1)
    assert failed(figures(), figures()) == []


@pytest.mark.parametrize("bucket", range(len(BUCKETS)))
@pytest.mark.parametrize("task", TASKS)
def test_a_search_that_is_lost_in_one_seed(task: str, bucket: int) -> None:
    wrong = figures()
    wrong["exact"][f"search, {task}"] = [0.94 if place == bucket else 0.99 for place in range(len(BUCKETS))]
    (what,) = failed(figures(), wrong)
    assert what.startswith(f"search, {task}") and BUCKETS[bucket] in what


def test_one_vector_that_holds_more_than_expected_or_less() -> None:
    better, worse = figures(), figures()
    better["exact"]["encdec, copy"] = [0.9, 0.9, 0.8, 0.7, 0.3, 0.1]
    worse["exact"]["encdec, copy"] = [0.2] + [0.0] * 5
    assert failed(better) == ["encdec, copy: of 16 to 20 symbols fewer than half are exact"]
    assert failed(worse) == ["encdec, copy: of 1 to 5 symbols at least half are exact"]


def test_weights_off_the_line_and_what_was_not_measured() -> None:
    wrong = figures()
    wrong["steep"]["reverse"] = 0.5
    (what,) = failed(wrong)
    assert "anti-diagonal" in what
    unknown = figures()
    unknown["exact"]["search, copy"][2] = None
    (check,) = [check for check in judge([unknown]) if not check.holds]
    assert check.measured == "not measured"


def test_half_of_the_rows_are_copied_and_half_reversed() -> None:
    pairs = mixed(torch.Generator().manual_seed(0), 40)
    for number, (source, present, target, there) in enumerate(zip(*pairs, strict=True)):
        mark, *symbols = source[present].tolist()
        assert mark == VOCAB + number // 20
        assert all(FIRST <= symbol < VOCAB for symbol in symbols)
        said = symbols if number < 20 else symbols[::-1]
        assert target[there].tolist() == [START, *said, END]


class Pointing:
    """Looks at the right place of each symbol and `off` beside it; the first place is the task's mark."""

    def __init__(self, task: str, off: int):
        self.task, self.off = task, off

    def alignment(self, source: Any, present: Any, target: Any) -> torch.Tensor:
        weights = torch.zeros(*target.shape, source.shape[1])
        places = wanted(present.sum(1) - 1, LONGEST, self.task) + 1 + self.off
        weights[:, :LONGEST].scatter_(2, places.clamp(0, source.shape[1] - 1)[..., None], 1.0)
        return weights


@pytest.mark.parametrize("task", TASKS)
def test_looking_one_beside_is_right_and_two_beside_is_wrong(task: str) -> None:
    row = ragged(torch.Generator().manual_seed(0), 50, 10, LONGEST, 20, FIRST)
    pairs = framed(row, list(TASKS).index(task))
    shares = [on_the_line(Pointing(task, off), pairs, row.lengths, task) for off in (0, 1, 3)]  # type: ignore[arg-type]
    assert shares[0] == shares[1] == 1.0 and shares[2] < 0.2


def test_backwards_is_not_forwards() -> None:
    row = Ragged(torch.arange(FIRST, FIRST + 20)[None], torch.tensor([20]))
    pairs = framed(row, 1)
    longer = [torch.cat([part, part.new_zeros(1, LONGEST - 20)], 1) for part in pairs]
    assert wanted(row.lengths, 20, "reverse")[0].tolist() == list(range(19, -1, -1))
    share = on_the_line(Pointing("copy", 0), type(pairs)(*longer), row.lengths, "reverse")  # type: ignore[arg-type]
    assert share == pytest.approx(2 / 20)  # the two in the middle
