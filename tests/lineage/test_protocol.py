"""What holds of every translator: no token sees later ones, padding is not there, steps are the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from qkv import spec
from qkv.lineage import bahdanau, convs2s, luong, transformer
from qkv.lineage.convs2s import ConvS2S
from qkv.lineage.transformer import Transformer, describe
from qkv.lineage.translation import beam_search, greedy, reordered
from tests.support import assert_close

VOCAB = 11


def of_attention(position: spec.Position | None) -> Transformer:
    hyper = transformer.Hyperparameters(layers=2, width=12, hidden=20, heads=3)
    return Transformer(describe(hyper, VOCAB, position))


def of_distances() -> Transformer:
    """Another description with the same protocol: scores fall with the distance, in a window of four."""
    node = describe(transformer.Hyperparameters(layers=2, width=12, hidden=20, heads=3), VOCAB, None)
    mixers = (
        spec.Attention(3, 3, 4, position=spec.Alibi(), mask=spec.Causal() & spec.Window(4)),
        spec.CrossAttention(3, 3, 4, source_width=12),
        spec.Gated("silu", 16),
    )
    assert node.decoder is not None
    return Transformer(replace(node, decoder=replace(node.decoder, layers=(spec.pre_norm(*mixers),) * 2)))


def of_recurrences(looking: Any = luong.Global, **sizes: Any) -> luong.Luong:
    return luong.Luong(luong.Sizes(VOCAB, VOCAB, 6, 5, 2, **sizes), looking)


def of_convolutions(position: spec.Position | None, *kernels: int) -> ConvS2S:
    """Channels that grow, so that residuals are projected too."""
    blocks = tuple((8 + 2 * i, kernel) for i, kernel in enumerate(kernels))
    hyper = convs2s.Hyperparameters(width=6, encoder=blocks, decoder=blocks, output=5)
    return ConvS2S(VOCAB, VOCAB, hyper, position)


TRANSLATORS: dict[str, Callable[[], Any]] = {
    "transformer": lambda: of_attention(spec.Sinusoidal()),
    "transformer-learned": lambda: of_attention(spec.Learned(20)),
    "transformer-without": lambda: of_attention(None),
    "transformer-distances": of_distances,
    "convs2s": lambda: of_convolutions(spec.Learned(20), 3, 3, 3),
    "convs2s-kernels": lambda: of_convolutions(spec.Learned(20), 5, 4, 1),
    "bahdanau": lambda: bahdanau.RNNsearch(bahdanau.Sizes(VOCAB, VOCAB, 6, 5, 4, 7)),
    "convs2s-without": lambda: of_convolutions(None, 3, 3),
    "luong": of_recurrences,
    "luong-dot": lambda: of_recurrences(score=spec.Dot(), feeding=False),
}


@pytest.fixture(params=TRANSLATORS)
def model(request: pytest.FixtureRequest) -> Any:
    """With biases that are not 0, and values so large that what is read and said shows in what is told."""
    torch.set_num_threads(1)  # matrices so small that two threads would wait for one another
    built = TRANSLATORS[request.param]().eval()
    for name, parameter in built.named_parameters():
        nn.init.normal_(parameter, std=2.0 if name.endswith(("length", "post.weight")) else 0.5)
    return built


def ids(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


SOURCE, TARGET = ids(3, 6), ids(3, 8, seed=2)
PRESENT = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1]]) == 1


@torch.no_grad()
def test_a_token_at_a_time_is_teacher_forcing(model: Any) -> None:
    """Longer than any kernel, with padding on either side of the source."""
    state, steps = model.begin(SOURCE, PRESENT), []
    for tokens in TARGET.T:
        logits, state = model.next(state, tokens)
        steps.append(logits)
    assert_close(torch.stack(steps, 1), model(SOURCE, PRESENT, TARGET))


@torch.no_grad()
def test_a_state_goes_with_its_row_and_may_be_gone_on_from_twice(model: Any) -> None:
    """As the beams of a search do: rows change places, one is doubled, the state before stays whole."""
    state = model.begin(SOURCE, PRESENT)
    for tokens in TARGET[:, :3].T:
        _, state = model.next(state, tokens)
    rows = torch.tensor([2, 0, 2])
    first, _ = model.next(reordered(state, rows), torch.tensor([2, 3, 4]))
    again, _ = model.next(state, torch.tensor([5, 6, 7]))
    said = torch.cat([TARGET[rows, :3], torch.tensor([[2], [3], [4]])], 1)
    assert_close(first, model(SOURCE[rows], PRESENT[rows], said)[:, -1])
    said = torch.cat([TARGET[:, :3], torch.tensor([[5], [6], [7]])], 1)
    assert_close(again, model(SOURCE, PRESENT, said)[:, -1])


@torch.no_grad()
def test_no_logits_hang_on_a_later_token(model: Any) -> None:
    """D8, D9: the token after target[t] is told from target[..t], and from all of it."""
    before = model(SOURCE, PRESENT, TARGET)
    for t in range(8):
        changed = TARGET.clone()
        changed[:, t] = (changed[:, t] - 1) % 9 + 2
        moved = (model(SOURCE, PRESENT, changed) - before).abs().amax((0, 2))
        assert (moved[:t] < 1e-6).all() and moved[t] > 1e-3


@torch.no_grad()
def test_padding_of_the_source_is_not_there(model: Any) -> None:
    """Rows of a batch, padded left and right with any token, are as alone."""
    together = model(SOURCE, PRESENT, TARGET)
    for row in range(3):
        alone = SOURCE[row : row + 1, PRESENT[row]]
        seen = torch.ones_like(alone, dtype=torch.bool)
        assert_close(together[row], model(alone, seen, TARGET[row : row + 1])[0])
        weights = model.alignment(SOURCE, PRESENT, TARGET)[row]
        assert (weights[:, ~PRESENT[row]] == 0).all()
        assert_close(weights[:, PRESENT[row]], model.alignment(alone, seen, TARGET[row : row + 1])[0])


@torch.no_grad()
def test_an_alignment_is_one_row_of_shares_of_the_source_a_token(model: Any) -> None:
    weights = model.alignment(SOURCE, PRESENT, TARGET)
    assert weights.shape == (3, 8, 6) and (weights >= 0).all()
    assert_close(weights.sum(-1), torch.ones(3, 8))
    assert weights[0].std(-1).min() > 2e-3


@torch.no_grad()
def test_searches_follow_the_model(model: Any) -> None:
    """Greedy is the argmax of teacher forcing on what was said; a wider search never scores worse."""
    said = greedy(model, SOURCE, PRESENT, start=0, end=1, most=5)
    narrow = beam_search(model, SOURCE, PRESENT, 0, 1, 5, beams=1, penalty=0.0)
    wide = beam_search(model, SOURCE, PRESENT, 0, 1, 5, beams=VOCAB**2, penalty=0.0)
    for row, words in enumerate(said):
        logs = model(SOURCE[row : row + 1], PRESENT[row : row + 1], torch.tensor([[0, *words]]))[0]
        logs = logs.log_softmax(-1)
        ended = len(words) < 5
        assert logs.argmax(-1)[: len(words) + ended].tolist() == [*words, *[1] * ended]
        assert narrow[row][0].tokens == words
        best = wide[row][0]
        logs = model(SOURCE[row : row + 1], PRESENT[row : row + 1], torch.tensor([[0, *best.tokens]]))[0]
        logs = logs.log_softmax(-1)
        total = sum(float(logs[i, token]) for i, token in enumerate([*best.tokens, 1]))
        assert best.finished and best.total == pytest.approx(total, abs=1e-4)
        assert not narrow[row][0].finished or best.score >= narrow[row][0].score - 1e-5
