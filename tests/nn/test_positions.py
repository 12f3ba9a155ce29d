"""Rotary, learned and sinusoidal positions: golden values and the laws they obey."""

from __future__ import annotations

import math

import pytest
import torch

from qkv import spec
from qkv.errors import RequestError
from qkv.nn import ContiguousCache, Layout
from qkv.nn.positions import Learned, Sinusoidal
from qkv.nn.rotary import Rotary, rotate
from tests.matrix.variants import attention, model, pre_norm
from tests.support import assert_close


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
    longest = 2 * math.pi * 10_000 ** (510 / 512)
    assert longest == pytest.approx(60_611, abs=1)


def test_the_two_sinusoid_layouts_hold_the_same_numbers() -> None:
    at = torch.arange(5)[None]
    apart = Sinusoidal(spec.Sinusoidal(layout="halves"), 8)(at)
    together = Sinusoidal(spec.Sinusoidal(), 8)(at)
    assert torch.equal(apart, torch.cat([together[..., 0::2], together[..., 1::2]], -1))


def test_rotating_by_zero_changes_nothing() -> None:
    x = torch.randn(1, 2, 3, 4)
    assert torch.equal(rotate(x, torch.ones(1, 1, 3, 2), torch.zeros(1, 1, 3, 2)), x)
