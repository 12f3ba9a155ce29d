"""H4: the judge both ways, that the two are of one size, and which gate starts open."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from qkv.claims.claim import Figures
from qkv.claims.experiments.tape_or_cell import (
    ASKED,
    CELL,
    FILLERS,
    GAPS,
    KEYS,
    PAIRS,
    TOKENS,
    VALUES,
    WIDTH,
    Reader,
    WithCell,
    WithTape,
    as_large,
    judge,
    named,
    parameters,
    rows_of,
    start,
)
from qkv.lineage.lstmn import LSTMNLayer


def figures() -> Figures:
    falls = [0.9 - 0.05 * place for place in range(len(GAPS))]
    return {
        "LSTMN": {"parameters": 36_000, "right": [0.95] * len(GAPS)},
        "LSTM": {"parameters": 36_100, "right": falls},
    }


def failed(*seeds: Figures) -> list[str]:
    return [check.what for check in judge(seeds) if not check.holds]


def test_all_holds_of_figures_as_expected() -> None:
    assert len(judge([figures()] * 3)) == 5 and failed(figures(), figures()) == []


@pytest.mark.parametrize(
    ("name", "right", "words"),
    [
        ("LSTM", [0.9] * 8, "the LSTM decays"),
        ("LSTMN", [0.95] * 7 + [0.85], "the LSTMN is flat"),
        ("LSTMN", [0.4, *[0.95] * 6, 0.42], "and has learned"),
        ("LSTM", [1.0] + [0.92] * 7, "is right more often"),
    ],
)
def test_one_seed_that_is_otherwise_is_enough(name: str, right: list[float], words: str) -> None:
    wrong = figures()
    wrong[name]["right"] = right
    if words == "and has learned":  # the LSTM stays below it
        wrong["LSTM"]["right"] = [0.4] + [0.2] * 7
    if words == "is right more often":  # and here the LSTMN below the other
        wrong["LSTMN"]["right"] = [0.9] * 8
    (what,) = failed(figures(), wrong)
    assert words in what


def test_sizes_that_differ_are_said() -> None:
    wrong = figures()
    wrong["LSTM"]["parameters"] = 40_000
    assert failed(wrong) == ["the two have equal parameters, within 2 %"]


def test_the_two_are_of_one_size() -> None:
    tape = WithTape(WIDTH, CELL)
    cell = as_large(tape, WIDTH)
    plain = WithCell(WIDTH, cell)
    # 4 c (w + h + 2) of torch's LSTM, the embedding, the answer
    assert parameters(plain) == 4 * cell * (WIDTH + cell + 2) + TOKENS * WIDTH + VALUES * (cell + 1)
    assert cell > CELL and abs(parameters(plain) / parameters(tape) - 1) < 0.01


@pytest.mark.parametrize("kind", [WithCell, WithTape])
def test_it_is_the_forget_gate_that_starts_open(kind: type[Reader]) -> None:
    """With all matrices at 0 the memory that goes in is multiplied by sigmoid(1); nothing is added."""
    model = kind(4, 3)
    start(model, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.zero_()
        after = memory_after(model, torch.full((3,), 2.0))
    assert torch.allclose(after, 2 * torch.sigmoid(torch.tensor(1.0)).expand(3), atol=1e-6)


def memory_after(model: Reader, memory: torch.Tensor) -> torch.Tensor:
    """Of one token more, where this memory is all there was before."""
    x = torch.zeros(1, 1, 4)
    if isinstance(model, WithCell):
        return cast(torch.Tensor, model.lstm(x, (torch.zeros(1, 1, 3), memory.view(1, 1, 3)))[1][1].flatten())
    assert isinstance(model, WithTape)
    layer = cast(LSTMNLayer, model.lstmn.layers[0])
    seen = torch.ones(1, dtype=torch.bool)
    before = torch.cat([torch.zeros(3), memory]).view(1, 1, 6)
    tape = layer.begin(x[:, 0])._replace(cells=before, there=seen[:, None])
    return layer.step(x[:, 0], tape, seen)[2].cells[0, -1, 3:]


def test_tokens_have_names() -> None:
    tokens = (0, 2 * VALUES + 4, ASKED - 1, ASKED, ASKED + KEYS - 1, ASKED + KEYS, TOKENS - 1)
    assert [named(token) for token in tokens] == ["1=1", "3=5", "8=8", "1?", "8?", "·", "·"]


def test_the_answer_is_the_value_beside_the_key_that_is_asked_for() -> None:
    tokens, answers = rows_of(torch.Generator().manual_seed(0), 300, 7)
    assert tokens.shape == (300, PAIRS + 7 + 1)
    for row, answer in zip(tokens.tolist(), answers.tolist(), strict=True):
        pairs = dict(divmod(token, VALUES) for token in row[:PAIRS])
        assert len(pairs) == PAIRS and pairs[row[-1] - ASKED] == answer
        assert all(ASKED + KEYS <= token < TOKENS for token in row[PAIRS:-1])
    assert len(set(answers.tolist())) == VALUES and len(set(tokens[:, PAIRS].tolist())) == FILLERS
