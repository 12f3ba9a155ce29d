"""What ties the systems together: who asks and what is mixed, and where each of them gets order from."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qkv.lineage
from qkv import spec
from qkv.lineage import bahdanau, convs2s, luong
from qkv.lineage.transformer import Hyperparameters, Transformer, describe
from qkv.nn import Layout, Taps, Transformer as Network, tap_names
from qkv.nn.attention import CrossAttention
from qkv.nn.build import build
from qkv.nn.layout import Source
from qkv.nn.scores import attend
from tests.support import assert_close

WORDS = ["<s>", "</s>", "I", "love", "you", "我", "爱", "你", "狗", "咬", "人"]
WIDTH = 12


def say(*words: str) -> Tensor:
    return torch.tensor([[WORDS.index(word) for word in words]])


I_LOVE_YOU, SAID = say("I", "love", "you"), say("<s>", "我", "爱", "你")
THERE = torch.ones(1, 3, dtype=torch.bool)


def large(model: Any) -> Any:
    """Values so large that what is read and said shows in what is told."""
    for name, parameter in model.eval().named_parameters():
        nn.init.normal_(parameter, std=2.0 if name.endswith(("length", "post.weight")) else 0.5)
    return model


def transformer(position: spec.Position | None = spec.Sinusoidal(), layers: int = 2) -> Any:
    hyper = Hyperparameters(layers=layers, width=WIDTH, hidden=20, heads=3)
    return large(Transformer(describe(hyper, len(WORDS), position)))


def convolutions(position: spec.Position | None = spec.Learned(40), blocks: int = 3, kernel: int = 3) -> Any:
    widths = ((8, kernel),) * blocks
    hyper = convs2s.Hyperparameters(6, widths, widths, 5)
    return large(convs2s.ConvS2S(len(WORDS), len(WORDS), hyper, position))


def recurrent() -> Any:
    return large(bahdanau.RNNsearch(bahdanau.Sizes(len(WORDS), len(WORDS), 6, 5, 4, 7)))


def stacked() -> Any:
    return large(luong.Luong(luong.Sizes(len(WORDS), len(WORDS), 6, 5, 2), luong.Global))


# --- who asks, and what is looked at: I love you ----------------------------------------------


@pytest.mark.parametrize(
    ("build_model", "asks_with_it"),
    [(recurrent, False), (stacked, True), (convolutions, True), (transformer, True)],
    ids=["bahdanau", "luong", "convs2s", "transformer"],
)
@torch.no_grad()
def test_each_word_is_told_from_shares_of_the_three_source_words(
    build_model: Callable[[], Any], asks_with_it: bool
) -> None:
    """E2, E4: four rows over I, love, you. Bahdanau asks with the state before the last word said was
    read, so that 爱 said in the place of 我 leaves that row as it was; those after him ask with it."""
    model = build_model()
    weights = model.alignment(I_LOVE_YOU, THERE, SAID)
    assert weights.shape == (1, 4, 3)
    assert_close(weights.sum(-1), torch.ones(1, 4))
    changed = model.alignment(I_LOVE_YOU, THERE, say("<s>", "爱", "爱", "你"))
    assert torch.equal(weights[:, 0], changed[:, 0])
    assert bool((weights[:, 1] - changed[:, 1]).abs().max() > 1e-4) is asks_with_it
    assert (weights[:, 2] - changed[:, 2]).abs().max() > 1e-4


@torch.no_grad()
def test_queries_come_of_what_is_said_and_keys_and_values_of_what_is_read() -> None:
    """E4: cross-attention of the first layer; another source leaves its queries, another target the rest."""
    model = transformer()
    points = [f"decoder.layers.0.cross.{part}" for part in ("query", "key", "value")]

    def seen(source: Tensor, target: Tensor) -> list[Tensor]:
        taps = Taps(points, tap_names(model.network.spec))
        model.network(target, source, tap=taps)
        return [taps[point] for point in points]

    first = seen(I_LOVE_YOU, SAID)
    assert [part.shape[2] for part in first] == [4, 3, 3]
    other_source, other_target = seen(say("you", "love", "I"), SAID), seen(I_LOVE_YOU, say("<s>", *"你爱我"))
    assert [torch.equal(a, b) for a, b in zip(first, other_source, strict=True)] == [True, False, False]
    assert [torch.equal(a, b) for a, b in zip(first, other_target, strict=True)] == [False, True, True]


@torch.no_grad()
def test_of_one_source_word_the_context_is_that_words_value() -> None:
    """E4: for Bahdanau the state h itself, keys and values being one; then (z + e) sqrt(.5), then W_v h."""
    one, there = say("love"), THERE[:, :1]
    rnn = recurrent()
    annotations = rnn.encoder(one, there)
    context, _ = rnn.context(torch.randn(1, 6), rnn.context.remember(annotations, there))
    assert torch.equal(context, annotations[:, 0])
    conv = convolutions()
    z, values, _ = conv.encoder(one, there)
    words = conv.encoder.embedding(one, Layout.unpadded(1, 1))
    assert_close(values, (z + words) * 0.5**0.5)
    part: Any = conv.decoder.attention[0]
    v = torch.randn(1, 1, 8)
    expected = (part.output(values) + v) * 0.5**0.5
    assert_close(part(v, torch.randn(1, 1, 6), convs2s.Source(z, values, there)).mixed, expected)
    cross: Any = transformer().network.decoder.layers[0].cross
    states = torch.randn(1, 1, WIDTH)
    layout = Layout(*2 * (torch.zeros(1, 2).long(),), source=Source(states, torch.zeros(1, 1).long()))
    expected = states @ cross.value.weight.T @ cross.output.weight.T
    assert_close(cross(torch.randn(1, 2, WIDTH), layout), expected.expand(1, 2, WIDTH))


@torch.no_grad()
def test_one_head_without_maps_is_luongs_dot_and_with_one_for_keys_his_general() -> None:
    """q . k, then q . W k; divided by sqrt(d) it is the Transformer's: dot with queries of that size."""
    queries, states, present = torch.randn(2, 4, 6), torch.randn(2, 5, 6), torch.arange(5) < 4
    layout = Layout.unpadded(2, 4)
    places = torch.where(present, torch.arange(5), -1).expand(2, 5)
    layout = Layout(layout.positions, layout.positions, source=Source(states, places))
    visible = present.expand(2, 1, 5)
    for score, factor in ((spec.Dot(), 1.0), (spec.Score(), 6**-0.5)):
        module: Any = CrossAttention(spec.CrossAttention(1, 1, 6, 6, score=score), 6)
        for linear in (module.query, module.key, module.value, module.output):
            nn.init.eye_(linear.weight)
        dot: Any = build(spec.Dot(), 6, 6)
        expected = attend(dot(queries * factor, dot.prepared(states)), states, visible).mixed
        assert_close(module(queries, layout), expected)
        general: Any = build(spec.General(), 6, 6)
        nn.init.normal_(general.key.weight)
        module.key.weight.copy_(general.key.weight)
        expected = attend(general(queries * factor, general.prepared(states)), states, visible).mixed
        assert_close(module(queries, layout), expected)


@torch.no_grad()
def test_a_step_of_convs2s_is_unscaled_dot_product_attention_times_the_root_of_the_length() -> None:
    """Equations 1 and 2 with maps of identity, against torch's kernel with scale 1 and values beside keys."""
    part = convs2s.Attention(6, 6)
    for linear in (part.query, part.output):
        linear.direction.copy_(torch.eye(6)[..., None])
        nn.init.ones_(linear.length)
        nn.init.zeros_(linear.bias)
    v, g, keys, values = (torch.randn(2, n, 6) for n in (4, 4, 5, 5))
    found = part(v, g, convs2s.Source(keys, values, torch.ones(2, 5, dtype=torch.bool))).mixed
    mixed = F.scaled_dot_product_attention((v + g) * 0.5**0.5, keys, values, scale=1.0)
    assert_close(found, (5**0.5 * mixed + v) * 0.5**0.5)


# --- order: attention sees a set --------------------------------------------------------------

DOG_BITES_MAN, MAN_BITES_DOG = say("狗", "咬", "人"), say("人", "咬", "狗")
LONG = torch.tensor([[2, 9, 4, 7, 4, 3, 10, 5]])
ORDER = torch.tensor([5, 0, 7, 2, 6, 1, 3, 4])


def stack(
    mask: spec.Mask, position: spec.Position | None = None, layers: int = 2
) -> Callable[[Tensor], Tensor]:
    """States (batch, length, width) of attention and feed-forward over tokens."""
    mixers = (spec.Attention(3, 3, 4, mask=mask), spec.Dense("relu", 20))
    tokens = spec.Tokens(len(WORDS), WIDTH, position=position)
    network = large(Network(spec.Model(decoder=spec.Stack(tokens, (spec.post_norm(*mixers),) * layers))))
    return lambda tokens: network(tokens)  # type: ignore[no-any-return]


def encoder(model: Any) -> Callable[[Tensor], Tensor]:
    """z (batch, length, width) of a ConvS2S encoder."""
    return lambda tokens: model.encoder(tokens, torch.ones_like(tokens, dtype=torch.bool)).keys  # type: ignore[no-any-return]


@torch.no_grad()
def test_a_whole_stack_without_positions_is_equivariant() -> None:
    """D26, E10: f(PX) = P f(X), so a dog that bites a man is a man that bites a dog; twins stay twins."""
    states = stack(spec.Everything())
    assert_close(states(LONG[:, ORDER]), states(LONG)[:, ORDER])
    assert_close(states(DOG_BITES_MAN).mean(1), states(MAN_BITES_DOG).mean(1))
    twice = states(LONG)[0]
    assert_close(twice[2], twice[4])  # both of them token 4
    assert (twice[2] - twice[3]).abs().max() > 1e-2


@pytest.mark.parametrize("position", [spec.Sinusoidal(), spec.Learned(8)], ids=["sinusoidal", "learned"])
@torch.no_grad()
def test_added_positions_tell_who_bites(position: spec.Position) -> None:
    states = stack(spec.Everything(), position)
    assert (states(DOG_BITES_MAN).mean(1) - states(MAN_BITES_DOG).mean(1)).abs().max() > 1e-2
    assert (states(LONG)[0, 2] - states(LONG)[0, 4]).abs().max() > 1e-2


@torch.no_grad()
def test_a_causal_mask_is_order_enough_from_the_second_layer_on() -> None:
    """D26, E10: without positions; one layer's last row sees the others as a set, the next one's does not."""
    for layers, blind in ((1, True), (2, False)):
        states = stack(spec.Causal(), layers=layers)
        moved = (states(DOG_BITES_MAN)[0] - states(MAN_BITES_DOG)[0].flip(0)).abs().amax(-1)
        assert moved[0] > 1e-2  # dog sees nothing before it, and everything
        last = (states(say("狗", "咬", "人")) - states(say("咬", "狗", "人")))[0, 2].abs().max()
        assert bool(last < 1e-5) is blind and (blind or last > 1e-2)
        twice = states(LONG)[0]
        assert (twice[2] - twice[4]).abs().max() > 1e-2


@torch.no_grad()
def test_without_positions_a_transformer_reads_a_bag_and_the_others_a_sentence() -> None:
    """D23: the source's order goes in through positions alone; its alignment moves with its words."""
    order = torch.tensor([2, 0, 1])
    for model, reads_order in (
        (transformer(None), False), (transformer(), True),
        (convolutions(None), True), (convolutions(None, kernel=1), False),
        (recurrent(), True), (stacked(), True),
    ):  # fmt: skip
        told = model(I_LOVE_YOU, THERE, SAID)
        moved = model(I_LOVE_YOU[:, order], THERE, SAID)
        assert bool((moved - told).abs().max() > 1e-3) is reads_order
        if not reads_order:
            assert_close(moved, told)
            weights = model.alignment(I_LOVE_YOU, THERE, SAID)
            assert_close(model.alignment(I_LOVE_YOU[:, order], THERE, SAID), weights[..., order])


# --- order: a convolution sees it inside its kernel (E12) -------------------------------------


@torch.no_grad()
def test_a_convolution_without_positions_tells_who_bites_and_one_of_kernel_1_does_not() -> None:
    states = encoder(convolutions(None))
    assert (states(DOG_BITES_MAN).mean(1) - states(MAN_BITES_DOG).mean(1)).abs().max() > 1e-2
    pointwise = encoder(convolutions(None, kernel=1))
    assert_close(pointwise(LONG[:, ORDER]), pointwise(LONG)[:, ORDER])


@torch.no_grad()
def test_a_convolution_sees_order_as_far_as_it_reaches() -> None:
    """Three blocks of kernel 3: row 0 changes when places 2 and 3 are swapped, not when 4 and 5 are."""
    states, before = encoder(convolutions(None)), torch.randint(2, 11, (1, 20))
    before[0, 2:6] = torch.tensor([2, 3, 4, 5])
    for place, reached in ((2, True), (4, False)):
        swapped = before.clone()
        swapped[0, [place, place + 1]] = before[0, [place + 1, place]]
        moved = (states(swapped) - states(before))[0, 0].abs().max()
        assert bool(moved > 1e-4) is reached and (reached or moved < 1e-6)


@torch.no_grad()
def test_a_convolution_knows_distances_and_by_its_padding_the_ends() -> None:
    """A sentence moved along moves its rows; of one word repeated, three rows at either end differ from the
    rest, which are alike. Attention without positions has them all alike."""
    states = encoder(convolutions(None))
    margin = torch.full((1, 8), 2)
    here = states(torch.cat([margin, LONG, margin, margin], 1))
    there = states(torch.cat([margin, margin, LONG, margin], 1))
    assert_close(there[:, 12:27], here[:, 4:19])
    rows = states(torch.full((1, 14), 3))[0]
    differs = (rows - rows[7]).abs().amax(-1) > 1e-4
    assert differs.nonzero()[:, 0].tolist() == [0, 1, 2, 11, 12, 13]
    assert_close(rows[3:11], rows[7].expand(8, 6))
    alike = stack(spec.Everything())(torch.full((1, 14), 3))[0]
    assert_close(alike, alike[:1].expand(14, WIDTH))


# --- the order of dates -----------------------------------------------------------------------


def test_learned_positions_are_older_than_sinusoids() -> None:
    """E13: places were learned in 2015 and in May 2017, before the sinusoids of June 2017."""
    rows = re.findall(r"^    (\w+)  +(\d{4})  (.+)$", qkv.lineage.__doc__ or "", re.MULTILINE)
    names, years = [name for name, _, _ in rows], [int(year) for _, year, _ in rows]
    assert years == sorted(years)
    brought = {name: what for name, _, what in rows}
    learned = [name for name in names if re.search("learned (places|positions)", brought[name])]
    assert learned == ["memory_network", "convs2s"] and "sinusoids" in brought["transformer"]
    assert all(names.index(name) < names.index("transformer") for name in learned)
