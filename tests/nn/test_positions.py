"""Rotary (on one axis and several), learned and sinusoidal positions: golden values and laws."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLTextRotaryEmbedding,
    Qwen3VLVisionRotaryEmbedding,
)

from qkv import spec
from qkv.errors import ConfigError, RequestError
from qkv.nn import ContiguousCache, Layout
from qkv.nn.positions import Learned, Sinusoidal
from qkv.nn.rotary import Rotary, rotate
from tests.matrix.variants import VARIANTS, VOCAB, attention, model, of, pre_norm
from tests.support import assert_close, random_model


def turned(x: list[float], position: int, node: spec.Rotary) -> torch.Tensor:
    at = torch.tensor([[position]])
    return (
        Rotary(node, len(x))
        .turn(torch.tensor(x, dtype=torch.float32)[None, None, None], Layout(at, at), keys=False)
        .flatten()
    )


def test_the_two_pairings_of_a_checkpoint() -> None:
    """Case P1: theta 1e4, position 1, x = 1, 2, 3, 4."""
    half = turned([1, 2, 3, 4], 1, spec.Rotary())
    assert torch.allclose(half, torch.tensor([-1.984111, 1.959901, 2.462378, 4.019800]), atol=1e-6)
    interleaved = turned([1, 2, 3, 4], 1, spec.Rotary(pairs="interleaved"))
    assert torch.allclose(interleaved, torch.tensor([-1.142640, 1.922076, 2.959851, 4.029800]), atol=1e-6)


def test_the_golden_values_of_d15() -> None:
    interleaved = turned([1, 0, 1, 0], 1, spec.Rotary(pairs="interleaved"))
    assert torch.allclose(interleaved, torch.tensor([0.540302, 0.841471, 0.99995, 0.01]), atol=1e-6)
    half = turned([1, 0, 1, 0], 1, spec.Rotary())
    assert torch.allclose(half, torch.tensor([-0.301169, 0, 1.381773, 0]), atol=1e-6)


def test_the_pairings_are_one_up_to_the_order_of_dimensions() -> None:
    """D15: even dimensions first, then odd."""
    x, order = torch.randn(8), torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    half = turned(x[order].tolist(), 9, spec.Rotary())
    assert_close(half, turned(x.tolist(), 9, spec.Rotary(pairs="interleaved"))[order])


@pytest.mark.parametrize("pairs", ["half", "interleaved"])
@pytest.mark.parametrize("shift", [-3, 1, 100])
def test_scores_depend_on_the_distance_only(pairs: str, shift: int) -> None:
    """D15: shifting all positions, by -3 too, changes no score; swapping query and key does."""
    node, q, k = spec.Rotary(pairs=pairs), torch.randn(16).tolist(), torch.randn(16).tolist()

    def score(query: int, key: int) -> float:
        return float(turned(q, query, node) @ turned(k, key, node))

    assert score(5, 2) == pytest.approx(score(5 + shift, 2 + shift), abs=1e-5)
    assert abs(score(5, 2) - score(2, 5)) > 1e-2


def test_rotation_keeps_lengths() -> None:
    x = torch.randn(2, 3, 4, 8)
    positions = torch.arange(4).expand(2, 4)
    out = Rotary(spec.Rotary(), 8).turn(x, Layout(positions, positions), keys=False)
    assert_close(out.norm(dim=-1), x.norm(dim=-1))


def test_only_the_leading_dimensions_turn_when_it_is_partial() -> None:
    x = torch.randn(8)
    out = turned(x.tolist(), 7, spec.Rotary(dims=4))
    assert torch.equal(out[4:], x[4:])
    assert_close(out[:4], turned(x[:4].tolist(), 7, spec.Rotary()))


@pytest.mark.parametrize(
    ("scaling", "squared"),
    [
        (spec.Yarn(4, 4096), 1.29648),
        (spec.Yarn(8, 4096), 1.45913),
        (spec.Yarn(16, 4096), 1.63139),
        (spec.Yarn(32, 4096), 1.81326),
        (spec.Yarn(40, 4096), 1.87385),
        (spec.Yarn(40, 4096, mscale=1.0, mscale_all_dim=1.0), 1.0),
        (spec.Yarn(128, 4096, attention_factor=1.4852), 2.2058),
        (spec.LongRope((1.0,) * 8, (4.0,) * 8, 4096, 32.0), 1.416667),  # 1 + ln 32 / ln 4096
    ],
    ids=str,
)
def test_a_temperature_multiplies_queries_and_keys_and_so_scores_twice(
    scaling: spec.Scaling, squared: float
) -> None:
    """D18, D18b, case P8: cosines and sines carry it, at every position, and scores its square."""
    node, x = spec.Rotary(scaling=scaling), torch.randn(16)
    for position in (0, 3000, 5000):
        out = turned(x.tolist(), position, node)
        assert float(out @ out / (x @ x)) == pytest.approx(squared, abs=2e-5)
        partial = turned(x.tolist(), position, replace(node, dims=8)) if isinstance(scaling, spec.Yarn) else x
        assert torch.equal(partial[8:], x[8:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_angles_are_fp32_whatever_the_stream(dtype: torch.dtype) -> None:
    """Case P5: head size 32, position 1857, pair 1: angle 1044.26784, cosine .306693."""
    at = torch.tensor([[1857]])
    rotary = Rotary(spec.Rotary(), 32)
    cosine, _ = rotary.angles(Layout(at, at), at)
    assert cosine.dtype == torch.float32
    assert float(cosine[0, 0, 0, 1]) == pytest.approx(0.306693, abs=5e-5)  # fp32 of an angle near 1044
    x = torch.zeros(1, 1, 1, 32, dtype=dtype)
    x[..., 1] = 1
    assert float(rotary.turn(x, Layout(at, at), keys=False)[0, 0, 0, 1]) == pytest.approx(0.306693, abs=2e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pairs", ["half", "interleaved"])
def test_what_is_turned_is_rounded_once_and_last(pairs: str, dtype: torch.dtype) -> None:
    """Case P5: also cosines, sines and their products are fp32."""
    x, layout = torch.randn(2, 3, 7, 16).to(dtype), Layout.unpadded(2, 7)
    rotary = Rotary(spec.Rotary(pairs=pairs), 16)  # type: ignore[arg-type]
    exact = rotary.turn(x.float(), layout, keys=False)
    assert torch.equal(rotary.turn(x, layout, keys=False), exact.to(dtype))


def test_a_base_that_grows_with_the_call_does_not_stay_grown() -> None:
    """Case P7: 16 positions raise the base to 43,267.487; a later call of 8 has the plain one."""
    rotary = Rotary(spec.Rotary(scaling=spec.DynamicNTK(2.0, 8)), 8)

    def first_turn(length: int) -> torch.Tensor:
        at = torch.arange(length)[None]
        cosine, _ = rotary.angles(Layout(at, at), at)
        return torch.acos(cosine[0, 0, 1])

    for _ in range(2):
        assert torch.allclose(first_turn(16), torch.tensor([1, 0.069336, 0.004807, 0.000333]), atol=3e-4)
        assert torch.allclose(first_turn(8), torch.tensor([1, 0.1, 0.01, 0.001]), atol=3e-4)


def test_a_base_by_length_follows_each_row_and_not_its_batch_mates() -> None:
    """Case P7 in a batch: the short row keeps the plain base beside a long one."""
    rotary = Rotary(spec.Rotary(scaling=spec.DynamicNTK(2.0, 8)), 8)
    present = torch.ones(2, 16, dtype=torch.bool)
    present[1, :8] = False
    layout = Layout.padded(present)
    cosine, _ = rotary.angles(layout, layout.positions)
    alone = torch.arange(8)[None]
    expected, _ = rotary.angles(Layout(alone, alone), alone)
    assert torch.equal(cosine[1, 0, 8:], expected[0, 0])


def test_a_learned_row_is_position_plus_offset() -> None:
    """Case P16: with an offset of 2, padding reads row 1 and the first token row 2."""
    table = Learned(spec.Learned(7, offset=2), 3)
    with torch.no_grad():
        table.weight.copy_(torch.arange(7.0)[:, None].expand(7, 3))
    positions = Layout.padded(torch.tensor([[0, 0, 1, 1, 1]])).positions
    assert table(positions)[0, :, 0].tolist() == [1, 1, 2, 3, 4]


def test_the_row_after_a_padded_prompt_is_the_next_one() -> None:
    """Case P16 through a cache: rows 1, 1, 2, 3, 4, then 5."""
    stack = model(pre_norm(attention(position=None)), position=spec.Learned(42, 2)).trunk
    cache = ContiguousCache(stack, 1, 6)
    first = cache.extend(Layout.padded(torch.tensor([[0, 0, 1, 1, 1]])))
    following = cache.extend(Layout.unpadded(1, 1))
    assert (first.positions + 2).tolist() == [[1, 1, 2, 3, 4]] and (following.positions + 2).tolist() == [[5]]


@pytest.mark.parametrize(("one", "other"), [(256, 257), (1000, 1001)])
def test_neighbouring_positions_stay_apart_in_a_bfloat16_model(one: int, other: int) -> None:
    """Case P5: bf16 rounds 257 to 256 and 1001 to 1000; the fastest pair turns a radian between them."""
    x = torch.tensor([1.0, 0, 0, 0], dtype=torch.bfloat16)[None, None, None]
    rotary = Rotary(spec.Rotary(), 4)
    for position in (one, other):
        at = torch.tensor([[position]])
        out = rotary.turn(x, Layout(at, at), keys=False).float().flatten()
        assert float(out[0]) == pytest.approx(math.cos(position), abs=4e-3)


@pytest.mark.parametrize("mask", [[[0.0, 1.0]], [[float("-inf"), 0.0]], [[0, 2, 1]], [[-1, 1, 1]]], ids=str)
def test_only_ones_and_zeros_say_where_tokens_are(mask: list[list[float]]) -> None:
    """Case M3: a mask of floats is additive and is not taken for one of presence."""
    with pytest.raises(RequestError, match="true or 1 where a token is"):
        Layout.padded(torch.tensor(mask))


def test_a_position_past_the_table_is_an_error_with_both_numbers() -> None:
    """D10: index max_len must raise."""
    table = Learned(spec.Learned(8), 4)
    with pytest.raises(RequestError, match=r"Position 8 has no row: .* ends at 8\."):
        table(torch.arange(9)[None])
    with pytest.raises(RequestError, match=r"Position 8 has no row: .* ends at 8\."):
        Learned(spec.Learned(10, offset=2), 4)(torch.arange(9)[None])


def test_the_golden_values_of_d10() -> None:
    pe = Sinusoidal(spec.Sinusoidal(), 4)(torch.arange(3)[None])[0]
    assert torch.allclose(pe[1], torch.tensor([0.841471, 0.540302, 0.01, 0.99995]), atol=1e-6)
    assert torch.allclose(pe[2], torch.tensor([0.909297, -0.416147, 0.019999, 0.9998]), atol=1e-6)


def test_sinusoids_have_constant_length_and_products_that_depend_on_distance() -> None:
    """D10: |PE|^2 = d / 2; PE(p) . PE(p + k) depends on k only and is even in k."""
    pe = Sinusoidal(spec.Sinusoidal(), 64)(torch.arange(200)[None])[0].double()
    assert torch.allclose(pe.square().sum(-1), torch.tensor(32.0).double(), atol=1e-4)
    products = pe @ pe.T
    for k in (1, 7, 50):
        along = products.diagonal(k)
        assert float(along.max() - along.min()) < 1e-4
        assert torch.allclose(products.diagonal(-k), along)


def test_the_two_sinusoid_layouts_hold_the_same_numbers() -> None:
    at = torch.arange(5)[None]
    apart = Sinusoidal(spec.Sinusoidal(layout="halves"), 8)(at)
    together = Sinusoidal(spec.Sinusoidal(), 8)(at)
    assert torch.equal(apart, torch.cat([together[..., 0::2], together[..., 1::2]], -1))


def test_moving_a_sinusoid_is_a_rotation_that_does_not_depend_on_where() -> None:
    """D10: PE(p + k) = R_k PE(p), and the rotation is the one rotary positions apply."""
    node = spec.Rotary(pairs="interleaved")
    # a pair of PE is (sin, cos); in the order (cos, sin) it is the unit vector turned by the angle
    pe = (
        Sinusoidal(spec.Sinusoidal(), 16)(torch.arange(60)[None])[0].unflatten(-1, (8, 2)).flip(-1).flatten(1)
    )
    for k in (1, 9):
        for p in (0, 3, 40):
            assert torch.allclose(turned(pe[p].tolist(), k, node), pe[p + k], atol=1e-5)


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_wavelengths_of_a_width_of_512(layout: str) -> None:
    """D10, E14: 2 pi * 10000^(2i/d), from 6.283 to 60,611."""
    quarter = Sinusoidal(spec.Sinusoidal(layout=layout), 512)  # type: ignore[arg-type]
    last, first = (510, 0) if layout == "interleaved" else (255, 0)
    slow = quarter(torch.tensor([[15_152, 15_153, 30_305, 30_306]]))[0, :, last]
    assert slow[:2].tolist() == pytest.approx([1, 1], abs=1e-8)  # a quarter of 60,611 is 15,152.7
    assert slow[2] > 0 > slow[3]  # and half of it is 30,305.5
    assert float(quarter(torch.tensor([[3]]))[0, 0, first]) == pytest.approx(math.sin(3), abs=1e-6)
    # far out too: an angle of 29,234 in fp32 would be off by a thousandth
    second = quarter(torch.tensor([[30_305]]))[0, 0, 2 if layout == "interleaved" else 1]
    assert float(second) == pytest.approx(math.sin(30_305 * 10_000 ** (-2 / 512)), abs=1e-6)


# --- several axes -----------------------------------------------------------------------------


def grid() -> torch.Tensor:
    """Two tokens of text, an image of 2 x 3, two tokens of text: time, height, width. Qwen2-VL, 2.1."""
    time = [0, 1, 2, 2, 2, 2, 2, 2, 5, 6]
    height = [0, 1, 2, 2, 2, 3, 3, 3, 5, 6]
    width = [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]
    return torch.tensor([time, height, width])[:, None]


def cosines(node: spec.Rotary, head_dim: int, axes: torch.Tensor) -> list[torch.Tensor]:
    layout = Layout.unpadded(*axes.shape[1:]).on_axes(axes)
    rotary = Rotary(node, head_dim)
    return [part[:, 0] for part in rotary.angles(layout, layout.positions, layout.axes)]


@pytest.mark.parametrize("sections", [(16, 24, 24), (2, 3, 3)])
def test_sections_in_blocks_equal_qwen2_vl(sections: tuple[int, ...]) -> None:
    dim = 2 * sum(sections)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}
    config = hf.Qwen2VLTextConfig(hidden_size=2 * dim, num_attention_heads=2, rope_parameters=rope)
    theirs = Qwen2VLRotaryEmbedding(config)(torch.zeros(1), grid())
    ours = cosines(spec.Rotary(axes=spec.Axes(sections)), dim, grid())
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other[..., : dim // 2])


@pytest.mark.parametrize("sections", [(24, 20, 20), (4, 2, 2), (5, 1, 2)])
def test_sections_in_turn_equal_qwen3_vl(sections: tuple[int, ...]) -> None:
    dim = 2 * sum(sections)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}
    config = hf.Qwen3VLTextConfig(head_dim=dim, rope_parameters=rope)
    theirs = Qwen3VLTextRotaryEmbedding(config)(torch.zeros(1), grid())
    ours = cosines(spec.Rotary(axes=spec.Axes(sections, "interleaved")), dim, grid())
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other[..., : dim // 2])


def test_two_axes_with_frequencies_of_their_own_equal_a_vision_model() -> None:
    config = hf.Qwen3VLConfig().vision_config
    config.hidden_size, config.num_heads = 64, 2
    config.num_attention_heads = 2
    theirs = Qwen3VLVisionRotaryEmbedding(config)(torch.zeros(1), grid()[1:].transpose(0, 1))
    ours = cosines(spec.Rotary(axes=spec.Axes((8, 8), own=True)), 32, grid()[1:])
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other[..., :16])


def test_frequencies_of_sections() -> None:
    """Of its place in the whole head, or beginning again: theta 1e4 and four pairs in two sections."""
    whole, own = (spec.Rotary(axes=spec.Axes((2, 2), own=own)).frequencies(8, 1)[0] for own in (False, True))
    assert whole.tolist() == pytest.approx([1, 0.1, 0.01, 0.001])
    assert own.tolist() == pytest.approx([1, 0.01, 1, 0.01])
    turns = spec.Rotary(axes=spec.Axes((2, 1, 1), "interleaved", own=True)).frequencies(8, 1)[0]
    assert turns.tolist() == pytest.approx([1, 1, 1, 0.01])


AXES = spec.Rotary(100.0, axes=spec.Axes((1, 1, 1)))


@pytest.mark.parametrize("scaling", [None, spec.DynamicNTK(2.0, 8)], ids=["plain", "dynamic"])
def test_axes_all_equal_to_the_position_are_plain_rotary(scaling: spec.Scaling | None) -> None:
    tokens, axes = torch.randint(0, VOCAB, (2, 10)), torch.arange(10).expand(3, 2, 10)
    plain = random_model(of(attention(position=spec.Rotary(100.0, scaling=scaling))))
    placed = random_model(of(attention(position=replace(AXES, scaling=scaling))))
    layout = Layout.unpadded(2, 10)
    assert torch.equal(placed(tokens), plain(tokens))
    assert torch.equal(placed(tokens, layout=layout.on_axes(axes)), plain(tokens))
    assert (placed(tokens, layout=layout.on_axes(axes // 2)) - plain(tokens)).abs().max() > 1e-2


@pytest.mark.parametrize("scaling", [None, spec.DynamicNTK(2.0, 8)], ids=["plain", "dynamic"])
@pytest.mark.parametrize("sizes", [[8, 2], [2, 6, 1, 1], [5, 5], [1] * 10])
def test_axes_go_on_through_a_cache(scaling: spec.Scaling | None, sizes: list[int]) -> None:
    """Text after an image counts from the furthest place on any axis; a cut inside the image is exact too."""
    model = random_model(of(attention(position=replace(AXES, scaling=scaling))))
    tokens, axes = torch.randint(0, VOCAB, (1, 10)), grid()
    whole = model(tokens, layout=Layout.unpadded(1, 10).on_axes(axes))
    cache, start, parts = ContiguousCache(model.spec.trunk, 1, 10), 0, []
    for size in sizes:
        piece = slice(start, start + size)
        layout = Layout.padded(torch.ones(1, size, dtype=torch.long), total=torch.tensor([10]))
        if start < 8:  # the rest is text, for which nothing need be said
            before = int(axes[:, :, :start].max()) + 1 if start else 0
            layout = layout.on_axes(axes[:, :, piece] - before)
        parts.append(model(tokens[:, piece], layout=layout, cache=cache))
        start += size
    assert_close(torch.cat(parts, 1), whole)


def test_axes_of_padded_rows_go_on_from_the_tokens_that_are_there() -> None:
    """An image that only one row has: its furthest place is no other row's, nor is the padding's."""
    model = random_model(of(attention(position=AXES)))
    cache, present = ContiguousCache(model.spec.trunk, 2, 11), torch.ones(2, 10, dtype=torch.long)
    present[1, :6] = 0
    axes = torch.cat([grid(), torch.full((3, 1, 10), 99)], 1)
    axes[:, 1, 6:] = torch.arange(4)
    tokens = torch.randint(0, VOCAB, (2, 11))
    model(tokens[:, :10], layout=Layout.padded(present).on_axes(axes), cache=cache)
    last = model(tokens[:, 10:], cache=cache)
    alone = torch.cat([grid(), torch.full((3, 1, 1), 7)], -1)
    assert_close(last[0], model(tokens[:1], layout=Layout.unpadded(1, 11).on_axes(alone))[0, -1:])
    assert_close(last[1], model(tokens[1:, 6:])[0, -1:])


def test_a_cache_that_is_emptied_forgets_its_axes() -> None:
    model, tokens = random_model(of(attention(position=AXES))), torch.randint(0, VOCAB, (1, 10))
    cache, layout = ContiguousCache(model.spec.trunk, 1, 20), Layout.unpadded(1, 10).on_axes(grid())
    model(tokens, layout=layout, cache=cache)
    with pytest.raises(RequestError, match="holds 3 axes and the call has 2"):
        cache.extend(Layout.unpadded(1, 10).on_axes(grid()[:2]))
    cache.truncate(2)  # inside the text before the image
    assert_close(model(tokens[:, 2:], cache=cache), model(tokens)[:, 2:])
    cache.reset()
    assert cache.extend(Layout.unpadded(1, 2).on_axes(grid()[:2, :, :2])).axes is not None
    cache.reset()
    assert cache.extend(Layout.unpadded(1, 2)).axes is None


def test_axes_and_sections_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Sections \(2, 2\) must sum up to the 3 pairs"):
        Rotary(spec.Rotary(axes=spec.Axes((2, 2))), 6)
    with pytest.raises(ConfigError, match="cannot take turns"):
        Rotary(spec.Rotary(axes=spec.Axes((1, 2), "interleaved")), 6)
    with pytest.raises(RequestError, match="they must be"):
        Layout.unpadded(1, 4).on_axes(torch.zeros(3, 1, 5, dtype=torch.long))
    model, layout = random_model(of(attention(position=AXES))), Layout.unpadded(1, 10).on_axes(grid()[:2])
    with pytest.raises(RequestError, match="has 2 axes, and this model turns by 3"):
        model(torch.zeros(1, 10, dtype=torch.long), layout=layout)


def test_a_cached_pass_that_begins_three_earlier_gives_the_same() -> None:
    """D15: positions from 3 on, and from 0 on, with the keys in a cache."""
    model, tokens = random_model(of(attention())), torch.randint(0, VOCAB, (1, 8))
    outputs = []
    for first in (3, 0):
        cache, at = ContiguousCache(model.spec.trunk, 1, 8), torch.arange(first, first + 6)[None]
        head = model(tokens[:, :6], layout=Layout(at, at), cache=cache)
        outputs.append(torch.cat([head, model(tokens[:, 6:], cache=cache)], 1))
    assert_close(outputs[0], outputs[1])


@pytest.mark.parametrize("kind", ["learned", "rotary"])
def test_padding_on_either_side_gives_the_logits_of_the_row_alone(kind: str) -> None:
    """Case P3: mask 00111 and 11100."""
    model = random_model(VARIANTS["learned-offset" if kind == "learned" else "grouped"])
    tokens = torch.randint(0, VOCAB, (1, 3))
    alone, other = model(tokens), torch.zeros(1, 2, dtype=torch.long)
    left = model(torch.cat([other, tokens], 1), layout=Layout.padded(torch.tensor([[0, 0, 1, 1, 1]])))
    right = model(torch.cat([tokens, other], 1), layout=Layout.padded(torch.tensor([[1, 1, 1, 0, 0]])))
    assert_close(left[:, 2:], alone)
    assert_close(right[:, :3], alone)


def test_the_table_of_a_model_for_2048_positions_has_2050_rows() -> None:
    """Case P16: position 2047 has a row, 2048 none."""
    table = Learned(spec.Learned(2050, offset=2), 1)
    nn.init.ones_(table.weight)
    assert table(torch.tensor([[2047]])).tolist() == [[[1]]]
    with pytest.raises(RequestError, match="ends at 2,048"):
        table(torch.tensor([[2048]]))


def test_rotating_by_zero_changes_nothing() -> None:
    x = torch.randn(1, 2, 3, 4)
    assert torch.equal(rotate(x, torch.ones(1, 1, 3, 2), torch.zeros(1, 1, 3, 2)), x)


def test_places_on_axes_go_where_their_rows_go() -> None:
    """Rows of different images change places, and each text goes on behind its own image."""
    model = random_model(of(attention(position=AXES)))
    tokens, axes = torch.randint(0, VOCAB, (2, 5)), torch.randint(0, 9, (3, 2, 4))
    axes[:, 1] += 20
    cache = ContiguousCache(model.spec.trunk, 2, 5)
    model(tokens[:, :4], layout=Layout.unpadded(2, 4).on_axes(axes), cache=cache)
    cache.select(torch.tensor([1, 0]))
    found = model(tokens[[1, 0], 4:], cache=cache)
    for row in range(2):
        alone = ContiguousCache(model.spec.trunk, 1, 5)
        layout = Layout.unpadded(1, 4).on_axes(axes[:, row : row + 1])
        model(tokens[row : row + 1, :4], layout=layout, cache=alone)
        assert_close(found[1 - row], model(tokens[row : row + 1, 4:], cache=alone)[0])


def test_long_factors_serve_what_is_longer_than_the_original() -> None:
    """LongRoPE: at 8 tokens the short factors turn, at 9 the long ones, the first tokens too."""
    scaling = spec.LongRope((1.0, 1.0), (2.0, 4.0), 8, 1.0)
    module, x = Rotary(spec.Rotary(100.0, scaling=scaling), 4), torch.randn(1, 1, 9, 4)
    for length, frequencies in ((8, [1.0, 0.1]), (9, [0.5, 0.025])):
        layout = Layout.unpadded(1, length)
        angles = torch.arange(length).float()[:, None] * torch.tensor(frequencies)
        expected = rotate(x[:, :, :length], angles.cos(), angles.sin())
        assert_close(module.turn(x[:, :, :length], layout, keys=False), expected)


def test_a_sequence_is_at_least_as_long_as_what_is_held_of_it() -> None:
    positions = torch.arange(5)[None]
    assert Layout(positions, positions, total=torch.tensor([3])).lengths.tolist() == [[5]]
    assert Layout(positions, positions, total=torch.tensor([9])).lengths.tolist() == [[9]]
