"""H24: the judge both ways, and what is asked and counted."""

from __future__ import annotations

import pytest
import torch

from qkv.claims.claim import Figures
from qkv.claims.experiments.retrieval_by_depth import (
    ANSWER,
    KEYS,
    MOST,
    NEAR,
    PAIRS,
    QUESTION,
    VALUES,
    VOCAB,
    answers_loss,
    asked_once,
    judge,
    pairs,
)
from qkv.claims.models import initialised, small_lm
from qkv.nn import Taps, tap_names


def figures() -> Figures:
    """64 pairs are a little worse, and of 128 the middle."""
    right = {str(count): [1.0] * 5 for count in PAIRS}
    right |= {"32": [0.95] * 5, "64": [0.9] * 5, "128": [0.6, 0.4, 0.3, 0.5, 0.8]}
    return {"right": right, "weight": {str(count): 0.9 - 0.05 * i for i, count in enumerate(PAIRS)}}


def test_all_holds_of_figures_as_expected() -> None:
    checks = judge([figures()] * 3)
    assert len(checks) == 8 and all(check.holds for check in checks)


@pytest.mark.parametrize(
    ("count", "right", "failed"),
    [
        ("8", [0.9] * 5, ["8 pairs, as in training"]),
        ("64", [1.0] * 5, ["beyond training: of 64 pairs"]),
        ("64", [0.1] * 5, ["beyond training: of 128 pairs"]),
        ("128", [0.52, 0.5, 0.49, 0.5, 0.5], ["128 pairs: the best and the worst"]),
        ("128", [0.3, 0.4, 0.9, 0.5, 0.2], ["128 pairs: the middle"]),
    ],
)
def test_answers_that_are_otherwise_in_one_seed_fail(
    count: str, right: list[float], failed: list[str]
) -> None:
    wrong = figures()
    wrong["right"][count] = right
    found = [check.what for check in judge([figures(), wrong]) if not check.holds]
    assert len(found) == len(failed) and all(w.startswith(f) for w, f in zip(found, failed, strict=True))


def test_a_weight_that_does_not_fall_fails() -> None:
    wrong = figures()
    wrong["weight"]["64"] = wrong["weight"]["32"]
    failed = [check.what for check in judge([figures(), wrong]) if not check.holds]
    assert failed == ["the weight on the asked pair falls with every doubling of the pairs"]


@pytest.mark.parametrize(("count", "asked"), [(5, 5), (40, 16), (128, 1)])
def test_keys_are_different_and_answers_are_their_values(count: int, asked: int) -> None:
    rows = pairs(torch.Generator().manual_seed(0), 20, count, asked)
    assert rows.tokens.shape == (20, count + asked)
    for row, answers, places in zip(*(part.tolist() for part in rows), strict=True):
        given = dict(divmod(token, VALUES) for token in row[:count])
        assert len(given) == count and max(given) < KEYS
        asked_for = [token - QUESTION for token in row[count:]]
        assert [given[key] for key in asked_for] == answers
        assert [row[place] // VALUES for place in places] == asked_for
        assert len(set(asked_for)) == asked
    assert int(rows.places.min()) >= 0 and int(rows.places.max()) >= 0.9 * count - 1


def test_the_weight_is_that_of_the_question_on_the_asked_pair() -> None:
    network = initialised(small_lm(VOCAB, width=16, position=NEAR), generator(0), lambda weight: 0.5)
    rows = pairs(generator(1), 6, 9, 1)
    right, weight = asked_once(network, rows, 4)
    taps = Taps("layers.*.attention.weights", tap_names(network.spec))
    with torch.no_grad():
        logits = network(rows.tokens, tap=taps)
    for i in range(6):
        each = [taps[name][i, head, 9, int(rows.places[i, 0])] for name in taps for head in range(4)]
        assert torch.allclose(weight[i], torch.stack(each), atol=1e-6)
        assert bool(right[i]) == (int(logits[i, -1, ANSWER:].argmax()) == int(rows.answers[i, 0]))


def test_the_loss_is_that_of_all_answers() -> None:
    network = initialised(small_lm(VOCAB, width=16, position=NEAR), generator(0), lambda weight: 0.5)
    rows = pairs(generator(1), 2, 6, 3)
    with torch.no_grad():
        logits, total = network(rows.tokens), 0.0
        for row in range(2):
            for i in range(3):
                chances = logits[row, 6 + i, ANSWER : ANSWER + VALUES].log_softmax(-1)
                total -= float(chances[rows.answers[row, i]])
        assert float(answers_loss(network)(rows)) == pytest.approx(total / 6, rel=1e-5)


def test_no_distance_of_a_longer_row_is_new() -> None:
    """The furthest in training is from the last question to the first pair."""
    assert max(NEAR.starts()) < 2 * MOST - 1


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
