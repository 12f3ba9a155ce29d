"""H3: the judge both ways, what rows ask for, and what counts as a repeat."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from qkv.claims.claim import Figures
from qkv.claims.experiments.attention_variants import (
    ALONE,
    LONGEST,
    MOST,
    SCORES,
    SYMBOLS,
    VARIANTS,
    by_quarter,
    judge,
    repeated,
    repeats,
)
from qkv.claims.translating import END, FIRST, START, Pairs


def figures() -> Figures:
    found: Figures = {
        name: {"exact": 0.97, "repeats": 0.01, "away": [0.1] * 4, "curve": {"last": 0.1}} for name in VARIANTS
    }
    found["local-m"] |= {"exact": 0.1, "away": [0.8, 1.5, 3.0, 5.0]}
    found["local-p"] |= {"exact": 0.95, "centre": 0.4}
    found[ALONE]["repeats"] = 0.05
    return found


def failed(*seeds: Figures) -> list[str]:
    return [check.what for check in judge(seeds) if not check.holds]


def test_all_holds_of_figures_as_expected() -> None:
    assert len(judge([figures()] * 3)) == 6 and failed(figures(), figures()) == []


@pytest.mark.parametrize(
    ("name", "figure", "value", "words"),
    [
        ("local-m", "away", [2.0, 1.9, 1.8, 1.7], "drifts"),
        ("local-m", "away", [0.1, 0.2, 0.3, 0.4], "ends more than a place off"),
        ("local-p", "centre", 1.2, "p_t is less than a place off"),
        ("local-p", "exact", 0.91, "at most 5 points apart"),
        ("concat", "curve", {"last": None}, "all train"),
        ("general", "repeats", 0.06, "input feeding cuts repeats"),
    ],
)
def test_one_seed_that_is_otherwise_is_enough(name: str, figure: str, value: object, words: str) -> None:
    wrong = figures()
    wrong[name][figure] = value
    (what,) = failed(figures(), wrong)
    assert words in what


def test_alike_for_having_learned_nothing_is_not_alike() -> None:
    wrong = figures()
    wrong["general"]["exact"] = wrong["local-p"]["exact"] = 0.0
    (what,) = failed(wrong)
    assert "at least half" in what


def test_the_table_has_every_score() -> None:
    (table,) = [check.measured for check in judge([figures()]) if "all train" in check.what]
    assert table == "rows exact: " + ", ".join(f"{name} 97.0 %" for name in SCORES)


def test_a_target_says_each_symbol_as_often_as_its_source_token_asks() -> None:
    pairs, places = repeated(torch.Generator().manual_seed(0), 200)
    lengths, counts = set(), set()
    for source, present, target, there, place in zip(*pairs, places, strict=True):
        asked = [divmod(token - FIRST, SYMBOLS) for token in source[present].tolist()]
        said, came = [], []
        for number, (times, symbol) in enumerate(asked):
            said += [FIRST + symbol] * (times + 1)
            came += [number] * (times + 1)
            counts.add(times + 1)
        assert target[there].tolist() == [START, *said, END]
        assert place[: len(came)].tolist() == came
        assert all(one[1] != other[1] for one, other in pairwise(asked))
        lengths.add(len(asked))
    assert lengths == set(range(2, LONGEST + 1)) and counts == set(range(1, MOST + 1))


class Saying:
    """Says these tokens after each of a target's, whatever came before."""

    def __init__(self, *tokens: int):
        self.tokens = torch.tensor([tokens])

    def __call__(self, source: Any, present: Any, target: Any) -> torch.Tensor:
        return F.one_hot(self.tokens, FIRST + SYMBOLS).float()


def test_a_repeat_is_a_symbol_said_again_where_the_target_leaves_it() -> None:
    """Of 3 3 4 5 the target leaves 3, 4 and 5; what comes after the start or inside 3 3 does not count."""
    target = torch.tensor([[START, 3, 3, 4, 5, END]])
    nothing = torch.ones(1, 1, dtype=torch.bool)
    pairs = Pairs(nothing.long(), nothing, target, torch.ones_like(target, dtype=torch.bool))
    said = {
        0.0: Saying(3, 3, 4, 5, END, 0),
        1 / 3: Saying(3, 3, 3, 5, END, 0),
        2 / 3: Saying(START, 9, 8, 4, 5, 0),
        1.0: Saying(3, 9, 3, 4, 5, 0),
    }
    for share, model in said.items():
        assert repeats(model, pairs) == pytest.approx(share)  # type: ignore[arg-type]


def test_quarters_are_of_each_rows_own_length() -> None:
    values = torch.tensor([[0.0, 1, 2, 3, 9, 9, 9, 9], [0, 0, 1, 1, 2, 2, 3, 3]])
    there = torch.tensor([[True] * 4 + [False] * 4, [True] * 8])
    assert by_quarter(values, there) == [0, 1, 2, 3]
