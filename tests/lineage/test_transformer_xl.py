"""Transformer-XL (D12, E18): recurrence over segments, relative scores, and text as streams."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qkv import spec
from qkv.errors import RequestError, UnsupportedError
from qkv.lineage.transformer_xl import (
    Dropout,
    Memory,
    Past,
    Settings,
    Training,
    TransformerXL,
    evaluate,
    explicit_scores,
    losses,
    segments,
    shifted,
    shifted_scores,
    streams,
)
from qkv.nn import ContiguousCache, Layout, Taps, Transformer, tap_names
from qkv.nn.attention import Attention
from qkv.nn.positions import sinusoids
from tests.support import assert_close, relative

TINY = Settings(vocab=13, layers=3, width=8, heads=2, head_dim=4, hidden=12, memory=4)


def random(settings: Settings = TINY) -> TransformerXL:
    """With weights large enough that everything shows."""
    model = TransformerXL(settings)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return model


def tokens(length: int, batch: int = 2) -> Tensor:
    return torch.randint(0, 13, (batch, length), generator=torch.Generator().manual_seed(1))


def read(
    model: TransformerXL, ids: Tensor, sizes: int | list[int], keep: int
) -> tuple[Tensor, dict[str, Tensor], Memory]:
    """Segment by segment: logits, every layer's output, and the last memory."""
    taps = Taps([f"layers.{i}.output" for i in range(model.settings.layers)], tap_names(model.network.spec))
    memory, found = None, []
    for segment in ids.split(sizes, dim=1):
        logits, memory = model(segment, memory, keep, taps)
        found.append(logits)
    assert memory is not None
    return torch.cat(found, 1), {name: torch.cat(taps.history[name], 1) for name in taps}, memory


# --- recurrence -------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [6, [3, 9], [1, 4, 7]])
def test_segments_equal_one_causal_pass_at_every_layer(sizes: int | list[int]) -> None:
    """D12: where the memory is as long as what was read."""
    model, ids = random(), tokens(12)
    found, layers, _ = read(model, ids, sizes, keep=12)
    expected, whole, _ = read(model, ids, 12, keep=0)
    assert_close(found, expected)
    assert len(layers) == 3
    for name in whole:
        assert_close(layers[name], whole[name])
    assert_close(found, model.network(ids))


def test_two_segments_need_a_memory_of_one() -> None:
    """D12: M >= L for two; with less, the first layers already differ."""
    model, ids = random(), tokens(12)
    assert_close(read(model, ids, 6, keep=6)[0], model.network(ids))
    found, layers, _ = read(model, ids, 6, keep=5)
    whole = read(model, ids, 12, keep=0)[1]
    assert_close(found[:, :6], model.network(ids)[:, :6])
    assert relative(layers["layers.0.output"], whole["layers.0.output"]) > 1e-3


def test_without_memory_segments_know_nothing_of_one_another() -> None:
    model, ids = random(), tokens(12)
    alone = torch.cat([model.network(segment) for segment in ids.split(4, dim=1)], 1)
    assert_close(read(model, ids, 4, keep=0)[0], alone)


@pytest.mark.parametrize("sizes", [1, 3, [5, 1, 6], 12])
def test_with_a_window_every_cut_into_segments_is_the_same(sizes: int | list[int]) -> None:
    """Each query then sees as many keys, and a memory of one fewer holds them all."""
    model, ids = random(replace(TINY, window=4)), tokens(12)
    assert_close(read(model, ids, sizes, keep=3)[0], model.network(ids))


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_each_layer_reaches_one_memory_further_back(layers: int) -> None:
    """D12: N layers reach N segments back, and no further, when M = L."""
    model, ids = random(replace(TINY, layers=layers)), tokens(20)
    expected = read(model, ids, 4, keep=4)[0]
    for segment in range(4):
        edited = ids.clone()
        edited[:, 4 * segment] = (edited[:, 4 * segment] + 1) % 13
        found = read(model, edited, 4, keep=4)[0]
        assert torch.equal(found[:, 16:], expected[:, 16:]) == (4 - segment > layers)


def test_a_memory_holds_the_latest_inputs_of_every_layer() -> None:
    model, ids = random(), tokens(9)
    taps = Taps(["layers.*.input"], tap_names(model.network.spec))
    model.network(ids, tap=taps)
    _, _, memory = read(model, ids, [4, 5], keep=7)
    assert memory.kept == 7 and len(memory.inputs) == 3
    for number, held in enumerate(memory.inputs):
        assert_close(held, taps[f"layers.{number}.input"][:, 2:])
    assert read(model, ids, [4, 5], keep=0)[2].kept == 0
    assert model(ids).memory.kept == TINY.memory


def test_reading_leaves_the_memory_it_reads_as_it_was() -> None:
    model, ids = random(), tokens(8)
    _, memory = model(ids[:, :4])
    before = [held.clone() for held in memory.inputs]
    first = model(ids[:, 4:], memory).logits
    assert torch.equal(model(ids[:, 4:], memory).logits, first)
    assert all(torch.equal(a, b) for a, b in zip(before, memory.inputs, strict=True))


# --- gradients --------------------------------------------------------------------------------


def naive_layer(attention: Attention, h: Tensor, memory: Tensor) -> Tensor:
    """softmax of the four terms, then the values: one row, with nothing of qkv.nn but its weights."""
    both = torch.cat([memory.detach(), h])
    position: Any = attention.position

    def heads(x: Tensor) -> Tensor:
        return x.view(len(x), 2, 4).transpose(0, 1)

    q = heads(h @ attention.query.weight.T)
    k = heads(both @ attention.key.weight.T)
    v = heads(both @ cast(Any, attention.value).weight.T)
    r = sinusoids(torch.arange(len(both)), 8, 1e4, "halves") @ position.key.weight.T
    scores = explicit_scores(q, k, heads(r), position.biases.content, position.biases.distance) / 2
    hidden = torch.ones(len(h), len(both)).tril(len(memory)) == 0
    mixed = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
    return mixed.transpose(0, 1).flatten(1) @ attention.output.weight.T


def naive(model: TransformerXL, ids: Tensor, length: int, keep: int) -> Tensor:
    """The whole model on one row, segment by segment; gradients flow as section 3.2 says."""
    network: Any = model.network
    table, stack = network.decoder.embedding.weight, network.decoder
    memories, found = [torch.zeros(0, 8)] * len(stack.layers), []
    for segment in ids.split(length):
        x = table[segment] * math.sqrt(8)
        for number, layer in enumerate(stack.layers):
            memory, given = memories[number], x
            x = _norm(x + naive_layer(layer.attention, x, memory), layer.attention_post)
            ff = layer.feed_forward
            inner = F.relu(x @ ff.up.weight.T + ff.up.bias) @ ff.down.weight.T + ff.down.bias
            x = _norm(x + inner, layer.feed_forward_post)
            both = torch.cat([memory, given.detach()])
            memories[number] = both[max(0, len(both) - keep) :]
        found.append(x @ table.T + network.head.bias)
    return torch.cat(found)


def _norm(x: Tensor, norm: Any) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias)


@pytest.mark.parametrize("keep", [2, 4, 7])
def test_equals_the_model_written_out_and_learns_what_it_learns(keep: int) -> None:
    """Logits and all gradients: W_k and W_v learn from the memory, what made the memory does not."""
    model, ids = random(), tokens(12, batch=1)
    expected = naive(model, ids[0], 4, keep)
    found, _, _ = read(model, ids, 4, keep)
    assert_close(found[0], expected)
    names, parameters = zip(*model.named_parameters(), strict=True)
    theirs = torch.autograd.grad(expected[8:].square().sum(), parameters)
    ours = torch.autograd.grad(found[0, 8:].square().sum(), parameters)
    for name, a, b in zip(names, ours, theirs, strict=True):
        assert relative(a, b) < 1e-4, name


def test_gradients_stop_at_the_memory() -> None:
    """E18: a segment, not a paragraph, and nothing is learnt through what was kept of it."""
    model, ids = random(), torch.arange(8)[None]
    table: Any = model.network.get_parameter("decoder.embedding.weight")
    _, memory = model(ids[:, :4])
    assert not any(held.requires_grad for held in memory.inputs)
    hidden = Taps(["final"], tap_names(model.network.spec))
    model(ids[:, 4:], memory, tap=hidden)
    hidden["final"].square().sum().backward()
    assert table.grad.abs().sum(-1).nonzero().flatten().tolist() == [4, 5, 6, 7]


def test_the_memorys_keys_and_values_teach_their_projections() -> None:
    """What a cache of keys and values would lose."""
    model, ids = random(replace(TINY, layers=1)), tokens(8)
    _, memory = model(ids[:, :4])
    key = model.network.get_parameter("decoder.layers.0.attention.key.weight")

    def learned(logits: Tensor) -> Tensor:
        return torch.autograd.grad(logits.square().sum(), key)[0]

    with_memory = learned(model(ids[:, 4:], memory).logits)
    cache = ContiguousCache(model.network.spec.trunk, 2, 8)
    model.network(ids[:, :4], cache=cache)
    with_cache = learned(model.network(ids[:, 4:], cache=cache))
    assert relative(with_cache, with_memory) > 1e-3


# --- relative scores --------------------------------------------------------------------------


def parts(queries: int = 5, keys: int = 9) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = [(2, queries, 4), (2, keys, 4), (2, keys, 4), (2, 4), (2, 4)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def visible(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys).tril(keys - queries).bool().expand(2, -1, -1)


@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (1, 9), (6, 6), (1, 1)])
def test_the_shift_equals_the_explicit_sum_where_it_is_seen(queries: int, keys: int) -> None:
    """D12: 2.7e-15."""
    given, seen = parts(queries, keys), visible(queries, keys)
    assert float((shifted_scores(*given) - explicit_scores(*given))[seen].abs().max()) < 1e-13


def test_beyond_the_causal_line_the_shift_leaves_rubbish() -> None:
    """D12: entries there must be masked. They are other rows' scores, and zeros."""
    products = torch.arange(1.0, 13).view(1, 3, 4)
    assert shifted(products)[0].tolist() == [[3, 4, 0, 5], [6, 7, 8, 0], [9, 10, 11, 12]]
    given = parts()
    assert (shifted_scores(*given) - explicit_scores(*given))[~visible(5, 9)].abs().max() > 0.1


def test_distances_are_ordered_from_the_largest_down() -> None:
    """D12: R from K - 1 to 0. The other way round the shift gives something else."""
    query, key, distance, u, v = parts()
    seen = visible(5, 9)
    wrong = shifted_scores(query, key, distance.flip(1), u, v)
    assert (wrong - explicit_scores(query, key, distance, u, v))[seen].abs().max() > 0.1


def test_the_models_scores_are_these() -> None:
    """What qkv.nn computes, with a memory of four, beside both ways."""
    model, ids = random(replace(TINY, layers=1)), tokens(9, batch=1)
    _, memory = model(ids[:, :4])
    taps = Taps(["layers.0.attention.scores"], tap_names(model.network.spec))
    model(ids[:, 4:], memory, tap=taps)
    attention: Any = model.network.trunk.layers[0].attention
    x = model.network.trunk.embedding(ids, Layout.unpadded(1, 9))
    r = attention.position.key(sinusoids(torch.arange(9), 8, 1e4, "halves")).view(9, 2, 4).transpose(0, 1)
    biases = attention.position.biases
    given = attention.as_queries(x)[0, :, 4:], attention.as_keys(x)[0], r, biases.content, biases.distance
    seen = visible(5, 9)
    scores = taps["layers.0.attention.scores"][0]
    assert_close(scores[seen], explicit_scores(*given)[seen] / 2)
    assert_close(scores[seen], shifted_scores(*given)[seen] / 2)
    assert bool(scores[~seen].isneginf().all())


def test_r_is_not_learned_and_u_and_v_belong_to_all_layers() -> None:
    """E18: what is new beside Shaw are terms (c) and (d), sinusoids for R, and the recurrence."""
    names = [name for name, _ in TransformerXL(TINY).named_parameters() if ".position." in name]
    leaves = Counter(name.split(".position.")[1] for name in names)
    assert leaves == {"key.weight": 3, "biases.content": 1, "biases.distance": 1}


@pytest.mark.parametrize(
    "position",
    [
        spec.Shaw(16),
        spec.Alibi(),
        spec.Buckets(8, 12, bidirectional=False),
        spec.Rotary(100.0),
        spec.Rotary(100.0, scaling=spec.DynamicNTK(2.0, 64)),
    ],
    ids=lambda position: type(position).__name__,
)
def test_other_relative_positions_go_with_a_memory(position: spec.Position) -> None:
    """Table 6 sets Shaw's beside these."""
    model, ids = random(replace(TINY, position=position)), tokens(12)
    assert_close(read(model, ids, 4, keep=12)[0], model.network(ids))


def test_absolute_positions_do_not_tell_memory_and_segment_apart() -> None:
    """D12: never with a memory. Both are numbered alike, so one word at two places weighs the same."""

    def apart(settings: Settings) -> float:
        """Of the second segment's places and its own memory's, where all are the same word."""
        model, taps = random(replace(settings, layers=1)), None
        memory = None
        for _ in range(3):
            taps = Taps(["layers.0.attention.weights"], tap_names(model.network.spec))
            _, memory = model(torch.full((1, 4), 5), memory, tap=taps)
        assert taps is not None
        weights = taps["layers.0.attention.weights"][0, :, 3]  # the last query sees all eight
        return float((weights[:, :4] - weights[:, 4:]).abs().detach().min())

    assert apart(replace(TINY, position=None, added=spec.Sinusoidal())) < 1e-6
    assert apart(TINY) > 1e-4


# --- streams and evaluation -------------------------------------------------------------------


def test_streams_are_contiguous() -> None:
    """D12: row b of the next segment goes on where row b of this one stopped."""
    rows = streams(torch.arange(23), 3)
    assert rows.tolist() == [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12, 13], [14, 15, 16, 17, 18, 19, 20]]
    given, after = zip(*segments(rows, 4), strict=True)
    assert [g.tolist() for g in given] == [
        [[0, 1, 2, 3], [7, 8, 9, 10], [14, 15, 16, 17]],
        [[4, 5], [11, 12], [18, 19]],
    ]
    assert [a.tolist() for a in after] == [(g + 1).tolist() for g in given]


def test_rows_that_change_places_spoil_the_memory() -> None:
    """D12: which is why a loader must not shuffle."""
    model, ids = random(), tokens(8)
    _, memory = model(ids[:, :4])
    right, wrong = model(ids[:, 4:], memory).logits, model(ids[:, 4:].flip(0), memory).logits.flip(0)
    assert relative(wrong, right) > 1e-2
    moved = Memory(tuple(held.flip(0) for held in memory.inputs))
    assert_close(model(ids[:, 4:].flip(0), moved).logits.flip(0), right)


@pytest.mark.parametrize(("count", "batch"), [(5, 3), (4, 0)])
def test_too_short_a_text_is_refused(count: int, batch: int) -> None:
    with pytest.raises(RequestError, match=f"{count} tokens are not two for each of {batch} rows"):
        streams(torch.arange(count), batch)


def test_losses_are_of_the_tokens_after() -> None:
    logits, after = torch.randn(2, 3, 5), torch.tensor([[0, 1, 2], [3, 4, 0]])
    assert_close(losses(logits, after), -logits.log_softmax(-1).gather(2, after[..., None])[..., 0])


@pytest.mark.parametrize("segment", [1, 3, 5, 50])
def test_evaluation_counts_every_token_but_the_first_once(segment: int) -> None:
    """With a memory of all that was read, whatever the segment, it is the loss of one pass."""
    model, rows = random(), tokens(15)
    expected = losses(model.network(rows[:, :-1]), rows[:, 1:]).mean()
    assert evaluate(model, rows, segment, keep=14) == pytest.approx(expected.item(), abs=1e-5)


def test_evaluation_may_look_further_back_than_training() -> None:
    """A memory longer than the settings': nearer to one pass, at the same weights."""
    model, rows = random(replace(TINY, layers=1)), tokens(15)
    whole = losses(model.network(rows[:, :-1]), rows[:, 1:]).mean().item()
    assert abs(evaluate(model, rows, 2, keep=0) - whole) > 1e-3
    assert evaluate(model, rows, 2, keep=12) == pytest.approx(whole, abs=1e-5)


def test_a_memory_of_another_batch_is_refused() -> None:
    model = random()
    _, memory = model(tokens(4))
    with pytest.raises(RequestError, match="memory is of 2 rows and the segment has 3"):
        model(tokens(4, batch=3), memory)
    with pytest.raises(RequestError, match="keep is -1; a memory has 0 places or more"):
        model(tokens(4), memory, keep=-1)


def test_a_memory_is_no_cache_of_other_things() -> None:
    past = Past(random().nothing(1))
    for ask in (
        lambda: past.keep("source", lambda: ()),
        lambda: past.state("0.mixer"),
        lambda: past.set_state("0.mixer"),
        lambda: past.truncate(0),
        lambda: past.select(torch.tensor([0])),
    ):
        with pytest.raises(UnsupportedError, match="memory of layers' inputs has no"):
            ask()


# --- settings ---------------------------------------------------------------------------------


def test_parameters_of_the_papers_size() -> None:
    """41 million: 12 layers, a tied table with a bias, and one u and v."""
    with torch.device("meta"):
        model = TransformerXL()
    layer = 5 * 512**2 + 2 * 512 * 2048 + 2048 + 512 + 4 * 512
    count = sum(p.numel() for p in model.parameters())
    assert count == 12 * layer + 204 * 513 + 2 * 512 == 41_055_436
    assert count == model.network.spec.parameters()


def test_weights_begin_as_in_the_authors_code() -> None:
    torch.manual_seed(0)
    model = TransformerXL(replace(TINY, width=64, heads=4, head_dim=16, hidden=80, vocab=50))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        else:
            mean = 1.0 if name.endswith("_post.weight") else 0.0
            assert float(parameter.detach().mean()) == pytest.approx(mean, abs=0.01), name
            assert float(parameter.detach().std()) == pytest.approx(0.02, rel=0.35), name


def test_training_as_published() -> None:
    published = Training()
    assert (published.segment, Settings().memory, published.batch) == (512, 512, 22)
    assert (published.learning_rate, published.dropout) == (2.5e-4, 0.1)


def test_dropout_is_a_tap() -> None:
    """Where the authors have it; a share of 0 leaves all as it is."""
    model, ids = random(), tokens(6)
    assert torch.equal(model(ids, tap=Dropout(0.0)).logits, model(ids).logits)
    torch.manual_seed(0)
    assert not torch.equal(model(ids, tap=Dropout(0.5)).logits, model(ids).logits)

    met: list[str] = []

    class Noted(Dropout):
        def __init__(self, path: str = "", points: frozenset[str] = Dropout(0.1).points):
            super().__init__(0.1, points)
            self.path = path

        def __call__(self, name: str, value: Tensor) -> Tensor:
            if name in self.points:
                met.append(self.path + name)
            return value

        def at(self, *names: str | int) -> Noted:
            path = self.path + ".".join(map(str, names)) + "."
            return Noted(path, super().at(*names).points)

    model(ids, tap=Noted())
    inside = ["attention.output", "feed_forward.hidden", "feed_forward.output"]
    assert met == ["embedding", *(f"layers.{i}.{name}" for i in range(3) for name in inside), "final"]


def test_is_run_by_the_library_as_any_other_description() -> None:
    """The mathematics stands once: qkv.nn's Transformer, given the same parameters, is this model."""
    model, ids = random(), tokens(7)
    other = Transformer(model.network.spec)
    other.load_state_dict(model.network.state_dict())
    assert_close(model(ids).logits, other(ids))


def test_learns_what_lies_a_segment_back() -> None:
    """H13 in small: a text that repeats after five, in segments of four and a memory of five, or of none."""
    torch.set_num_threads(1)  # for so little a second one costs more than it does

    def trained(keep: int) -> float:
        torch.manual_seed(0)
        model = TransformerXL(replace(TINY, vocab=4, layers=1, width=16, head_dim=8, hidden=16, std=0.3))
        optimiser = torch.optim.Adam(model.parameters(), lr=2e-2)
        for _ in range(80):
            text = torch.randint(0, 4, (32, 5)).repeat(1, 2)
            _, memory = model(text[:, :5], None, keep)
            loss = losses(model(text[:, 5:9], memory).logits, text[:, 6:]).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return loss.item()

    assert trained(keep=5) < 0.2
    assert trained(keep=0) > 1.2  # of ln 4 = 1.386
