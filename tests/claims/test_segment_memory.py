"""H13: the judge both ways, what is planted, and which distances which memory can reach at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qkv.claims.claim import Figures, Run
from qkv.claims.experiments.segment_memory import (
    ASK,
    EDGES,
    FILLERS,
    FURTHEST,
    LAYERS,
    MEMORY,
    SEGMENT,
    VALUES,
    VOCAB,
    Planted,
    judge,
    made,
    planted,
    recompute,
    right,
)
from qkv.lineage.transformer_xl import TransformerXL

SHARES = len(EDGES) - 1
WITHIN = EDGES.index(FURTHEST)


def figures() -> Figures:
    shares = {"vanilla": [0.13] * SHARES, "XL": [0.97] * WITHIN + [0.3] * (SHARES - WITHIN)}
    return {
        "planted": {
            name: {"right": share} for name, share in (shares | {"XL, longer": [0.95] * SHARES}).items()
        },
        "text": {
            "corpus": "moby-dick",
            "vanilla": 2.0,
            "XL": 1.9,
            "XL, longer": 1.88,
            "absolute": 2.1,
            "absolute, memory": 2.2,
            "microseconds": {"cached": 50.0, "recomputed": 2000.0},
        },
    }


def test_all_holds_of_figures_as_expected() -> None:
    checks = judge([figures()] * 3)
    assert len(checks) == 7 and all(check.holds for check in checks)


@pytest.mark.parametrize(
    ("name", "share", "failed"),
    [
        ("vanilla", 0.2, "from 40 to 90 back vanilla"),
        ("XL", 0.5, "from 40 to 90 back, short"),
        ("XL, longer", 0.25, "from 90 to 130"),
    ],
)
def test_answers_that_are_otherwise_in_one_seed_fail(name: str, share: float, failed: str) -> None:
    wrong = figures()
    right = wrong["planted"][name]["right"]
    wrong["planted"][name]["right"] = [min(share, one) if share < one else share for one in right]
    found = [check.what for check in judge([figures(), wrong]) if not check.holds]
    assert len(found) == 1 and found[0].startswith(failed)


@pytest.mark.parametrize(
    ("name", "value", "failed"),
    [
        ("vanilla", 1.89, "XL is below vanilla"),
        ("XL, longer", 1.91, "a longer memory in evaluation has a lower loss"),
        ("absolute, memory", 2.05, "memory makes absolute positions worse"),
        ("microseconds", {"cached": 50.0, "recomputed": 400.0}, "takes under a tenth"),
    ],
)
def test_a_text_that_is_otherwise_in_one_seed_fails(name: str, value: object, failed: str) -> None:
    wrong = figures()
    wrong["text"][name] = value
    found = [check.what for check in judge([figures(), wrong]) if not check.holds]
    assert len(found) == 1 and failed in found[0]


def drawn(furthest: int = FURTHEST) -> Planted:
    return planted(torch.Generator().manual_seed(0), 8, 2000, furthest)


def test_what_is_asked_for_is_the_latest_value_and_stands_as_far_back_as_said() -> None:
    rows = drawn()
    asked = rows.tokens == ASK
    assert torch.equal(asked, rows.answers >= 0) and 0.2 < float(asked.float().mean()) < 0.25
    for row, place in asked.nonzero().tolist():
        back = int(rows.distances[row, place])
        assert 1 <= back <= FURTHEST
        before = rows.tokens[row, :place]
        value = (before >= FILLERS) & (before < FILLERS + VALUES)
        assert int(value.nonzero()[-1]) == place - back
        assert int(before[place - back]) - FILLERS == int(rows.answers[row, place])
    assert int(rows.tokens.max()) == ASK == VOCAB - 1


def test_every_distance_and_value_is_asked_and_rows_are_not_in_step() -> None:
    rows = drawn(60)
    asked = rows.answers >= 0
    assert set(rows.distances[asked].tolist()) == set(range(1, 61))
    assert set(rows.answers[asked].tolist()) == set(range(VALUES))
    first = ((rows.tokens >= FILLERS) & (rows.tokens < ASK)).int().argmax(1)
    assert len(set(first.tolist())) > 4


def test_right_answers_are_counted_by_distance() -> None:
    """A model that always says value 3 is right where it is 3."""

    class Three:
        def __call__(self, tokens: Tensor, memory: None, keep: int) -> tuple[Tensor, None]:
            logits = torch.zeros(*tokens.shape, VOCAB)
            logits[..., FILLERS + 3] = 1
            return logits, None

    rows = drawn(EDGES[-1])
    always = rows._replace(answers=torch.where(rows.answers >= 0, 3, -1))
    assert right(Three(), always, 0) == [1.0] * SHARES  # type: ignore[arg-type]
    near = rows.answers.masked_fill(rows.distances >= 10, 2)
    near = torch.where((rows.answers >= 0) & (rows.distances < 10), 3, near)
    half = rows._replace(answers=torch.where(rows.answers >= 0, near, -1))
    assert right(Three(), half, 0) == [1.0] + [0.0] * (SHARES - 1)  # type: ignore[arg-type]


@torch.no_grad()
def changes(model: TransformerXL, keep: int, back: int) -> bool:
    """Whether a token so far back changes the logits of a segment's first place."""
    start = 4 * SEGMENT
    tokens = torch.randint(FILLERS, (1, start + 1), generator=torch.Generator().manual_seed(1))
    other = tokens.clone()
    other[0, start - back] += 1
    memory, logits = None, tokens
    for part in torch.cat([tokens, other]).split(SEGMENT, 1):
        logits, memory = model(part, memory, keep)
    return not torch.equal(logits[0, 0], logits[1, 0])


def test_n_layers_reach_n_memories_back_and_none_without() -> None:
    model = made(Run("segment-memory", 0, "smoke"), VOCAB, MEMORY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20)
    assert changes(model, 0, 0) and not changes(model, 0, 1)
    assert changes(model, MEMORY, LAYERS * MEMORY) and not changes(model, MEMORY, LAYERS * MEMORY + 1)


def test_variants_start_from_the_same_weights() -> None:
    run = Run("segment-memory", 1, "smoke")
    one, other, absolute = made(run, VOCAB, 0), made(run, VOCAB, MEMORY), made(run, VOCAB, MEMORY, True)
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name])
    assert absolute.settings.position is None and absolute.settings == replace(
        other.settings, position=None, added=absolute.settings.added
    )


def test_windows_read_anew_give_what_one_pass_gives_at_its_end() -> None:
    model = made(Run("segment-memory", 0, "smoke"), VOCAB, 0)
    windows = torch.randint(VOCAB, (35, 10), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(recompute(model.network, windows), model.network(windows)[:, -1], atol=1e-5)
