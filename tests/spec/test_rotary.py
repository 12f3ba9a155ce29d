"""Rotary frequencies: values worked out by hand and by others, and equality with transformers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from qkv.spec import (
    NTK,
    DynamicNTK,
    Interpolation,
    Llama3,
    LongRope,
    Proportional,
    Rotary,
    Scaling,
    Yarn,
)
from qkv.spec.rotary import inverse_frequencies, mscale


def angles(scaling: Scaling | None, theta: float, dims: int, length: int = 1) -> np.ndarray[Any, Any]:
    return Rotary(theta, scaling=scaling).frequencies(dims, length)[0]


# --- plain ------------------------------------------------------------------------------------


def test_plain_frequencies() -> None:
    frequencies, factor = Rotary().frequencies(4, 1)
    assert frequencies.tolist() == [1.0, pytest.approx(0.01)]
    assert frequencies.dtype == np.float32 and factor == 1.0


def test_partial_rotary_spreads_its_frequencies_over_the_dimensions_that_turn() -> None:
    frequencies, _ = Rotary(dims=8).frequencies(96, 1)
    assert np.allclose(frequencies, [1, 0.1, 0.01, 0.001])


def test_an_angle_far_out_is_right_in_fp32() -> None:
    """Case P5: d32, position 1857, pair 1."""
    angle = np.float32(1857) * angles(None, 10_000.0, 32)[1]
    assert float(angle) == pytest.approx(1044.26784, rel=1e-6)
    assert math.cos(float(angle)) == pytest.approx(0.306693, abs=2e-4)  # fp32 keeps six figures of the angle


# --- interpolation, NTK, dynamic NTK (D16, D17) -----------------------------------------------


def test_interpolation_divides_every_angle() -> None:
    assert np.array_equal(angles(Interpolation(4), 1e4, 64), angles(None, 1e4, 64) / np.float32(4))


def test_interpolation_moves_position_m_to_m_over_the_factor() -> None:
    """D16: f'(x, m) = f(x, m L / L'): position 4096 of a doubled context turns as 2048 of the first."""
    assert np.array_equal(4096 * angles(Interpolation(2), 1e4, 128), 2048 * angles(None, 1e4, 128))


def test_between_positions_scores_stay_near_the_straight_line() -> None:
    """D16: off by at most d max|h| (s - s1)(s2 - s) / (8 ln c), and d max|h| / 294.73 halfway."""
    assert 32 * math.log(1e4) == pytest.approx(294.731, abs=5e-4)
    frequencies = angles(None, 1e4, 128).astype(np.float64)
    rng = np.random.default_rng(0)
    largest = 0.0
    for _ in range(50):
        h = rng.uniform(-1, 1, 64) + 1j * rng.uniform(-1, 1, 64)

        def score(s: float, h: Any = h) -> float:
            return float((h * np.exp(1j * s * frequencies)).sum().real)

        start = int(rng.integers(0, 2000))
        for part in (0.1, 0.5, 0.8):
            straight = (1 - part) * score(start) + part * score(start + 1)
            bound = 128 * np.abs(h).max() * part * (1 - part) / (8 * math.log(1e4))
            assert abs(score(start + part) - straight) <= bound
            largest = max(largest, abs(score(start + part) - straight) / bound)
    assert largest > 0.1  # the bound is not empty


@pytest.mark.parametrize(("length", "unturned"), [(2048, 23), (4096, 18)])
def test_pairs_that_never_complete_a_turn(length: int, unturned: int) -> None:
    """H12 as part 5 reads it: rotary pairs of 64; 23 for LLaMA-1's context, 18 for Llama 2's."""
    assert (length * angles(None, 1e4, 128) < 2 * math.pi).sum() == unturned


@pytest.mark.parametrize(("length", "base"), [(64, 37), (128, 111), (256, 326)])
def test_a_base_with_the_same_share_of_unturned_pairs(length: int, base: int) -> None:
    """H12: (L / 2 pi)^(64 / 41) leaves 23 of 64 pairs short of a turn at a small L."""
    exact = (length / (2 * math.pi)) ** (64 / 41)
    assert round(exact) == base
    # pair 41 completes exactly one turn; those behind it none
    assert length * angles(None, exact, 128)[41] == pytest.approx(2 * math.pi, rel=1e-6)
    assert (length * angles(None, exact * 1.001, 128) < 2 * math.pi).sum() == 23


@pytest.mark.parametrize(
    ("factor", "base"), [(2, 20_221), (4, 40_890), (8, 82_685), (16, 167_199), (32, 338_097)]
)
def test_ntk_raises_the_base(factor: float, base: int) -> None:
    frequencies = angles(NTK(factor), 1e4, 128)
    assert round(1e4 * factor ** (128 / 126)) == base
    assert np.allclose(frequencies, inverse_frequencies(base, 128), rtol=2e-5)
    plain = angles(None, 1e4, 128)
    assert frequencies[0] == plain[0]
    assert frequencies[-1] == pytest.approx(plain[-1] / factor)
    ratios = factor ** (-2 * np.arange(64) / 126)
    assert np.allclose(frequencies / plain, ratios)


def test_a_hand_set_base_as_a_factor() -> None:
    """Code Llama's 10^6 is what the formula gives for 93.06."""
    assert pytest.approx(1e6, rel=1e-4) == 1e4 * 93.06 ** (128 / 126)
    assert np.allclose(angles(NTK(93.06), 1e4, 128), angles(None, 1e6, 128), rtol=1e-4)


def test_dynamic_ntk_follows_this_calls_length_only() -> None:
    """Case P7."""
    scaling = DynamicNTK(2, 8)
    grown = [1, 0.069336, 0.004807, 0.000333]
    assert np.allclose(angles(scaling, 1e4, 8, 16), grown, atol=5e-7)
    assert np.allclose(angles(scaling, 1e4, 8, 16), inverse_frequencies(43267.487, 8))
    assert np.allclose(angles(scaling, 1e4, 8, 8), [1, 0.1, 0.01, 0.001])
    assert np.allclose(angles(scaling, 1e4, 8, 3), [1, 0.1, 0.01, 0.001])


# --- YaRN (D18) -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theta", "dims", "original", "bounds"),
    [
        (1e4, 128, 4096, (20, 46)),
        (1e4, 128, 2048, (16, 41)),
        (1e4, 64, 4096, (10, 23)),  # DeepSeek
        (1e6, 128, 32768, (23, 40)),  # Qwen3
    ],
)
def test_yarn_bounds(theta: float, dims: int, original: int, bounds: tuple[int, int]) -> None:
    assert Yarn(16, original).bounds(theta, dims) == bounds


def test_yarn_bounds_are_clamped() -> None:
    """Without the clamp at 0 the first six would be .7143, .5714, .4286, .2857, .1429, 0."""
    kept = Yarn(4, 64).kept(1e4, 32)
    assert np.allclose(kept[:6], [1, 0.8, 0.6, 0.4, 0.2, 0])
    assert not kept[5:].any()


def test_a_yarn_ramp_of_no_length_is_a_step() -> None:
    """D18: high += .001 where both ends are equal, as at a length below one turn."""
    assert Yarn(4, 6).bounds(1e4, 16) == (0, 0)
    assert Yarn(4, 6).kept(1e4, 16).tolist() == [1, 0, 0, 0, 0, 0, 0, 0]


def test_yarn_small() -> None:
    scaling = Yarn(4, 2048)
    assert np.allclose(scaling.kept(1e4, 8), [1, 1, 0.5, 0])
    assert np.allclose(angles(scaling, 1e4, 8), [1, 0.1, 0.00625, 0.00025])


def test_yarn_with_bounds_not_rounded() -> None:
    """gpt-oss."""
    scaling = Yarn(32, 4096, truncate=False)
    assert np.allclose(scaling.bounds(150_000.0, 64), [8.0928, 17.3980], atol=1e-4)
    pairs = [9, 12, 13, 17]
    expected = [3.17057e-2, 6.79496e-3, 3.86036e-3, 1.29319e-4]
    assert np.allclose(angles(scaling, 150_000.0, 64)[pairs], expected, rtol=5e-6)
    rounded = [3.16208e-2, 7.01571e-3, 4.06955e-3, 2.27948e-4]
    assert np.allclose(angles(Yarn(32, 4096), 150_000.0, 64)[pairs], rounded, rtol=5e-6)


@pytest.mark.parametrize(
    ("original", "pair", "gap", "ratio_pair", "ratio"), [(4096, 30, 0.367, 38, 3.04), (2048, 25, 0.384, 0, 0)]
)
def test_paper_and_deployed_ramp_differ(
    original: int, pair: int, gap: float, ratio_pair: int, ratio: float
) -> None:
    code, paper = Yarn(16, original), Yarn(16, original, ramp="paper")
    apart = np.abs(code.kept(1e4, 128) - paper.kept(1e4, 128))
    assert apart.argmax() == pair and apart.max() == pytest.approx(gap, abs=5e-4)
    if ratio:
        ratios = angles(code, 1e4, 128) / angles(paper, 1e4, 128)
        assert ratios[30] == pytest.approx(2.17, abs=5e-3)
        assert ratios.argmax() == ratio_pair and ratios.max() == pytest.approx(ratio, abs=5e-3)


def test_paper_ramp_is_linear_in_turns() -> None:
    """Section 3.2: gamma = (r - alpha) / (beta - alpha) with r = L theta / 2 pi."""
    scaling = Yarn(8, 4096, ramp="paper")
    for pair, kept in enumerate(scaling.kept(1e4, 64)):
        turns = 4096 * 10_000 ** (-2 * pair / 64) / (2 * math.pi)
        assert kept == pytest.approx(min(1, max(0, (turns - 1) / 31)))


@pytest.mark.parametrize(
    ("factor", "temperature", "squared"),
    [
        (4, 1.13863, 1.29648),
        (8, 1.20794, 1.45913),
        (16, 1.27726, 1.63139),
        (32, 1.34657, 1.81326),
        (40, 1.36889, 1.87385),
    ],
)
def test_yarn_temperature(factor: float, temperature: float, squared: float) -> None:
    assert mscale(factor) == Yarn(factor, 4096).temperature() == pytest.approx(temperature, abs=5e-6)
    assert mscale(factor) ** 2 == pytest.approx(squared, abs=5e-6)


def test_explicit_attention_factor_is_final() -> None:
    """Case P8."""
    assert Yarn(64, 4096, attention_factor=1.0).temperature() == 1.0
    assert Yarn(64, 4096).temperature() == pytest.approx(1.415888, abs=5e-7)
    assert Yarn(128, 4096).temperature() == pytest.approx(1.485203, abs=5e-7)
    assert Yarn(128, 4096, attention_factor=1.4852).temperature() == 1.4852
    assert Yarn(64, 4096, attention_factor=1.0, mscale=2.0, mscale_all_dim=1.0).temperature() == 1.0


def test_mscales_of_deepseek() -> None:
    """Equal ones cancel on cosines and sines; the softmax scale carries the square instead."""
    assert Yarn(40, 4096, mscale=1.0, mscale_all_dim=1.0).temperature() == 1.0
    assert 192**-0.5 * mscale(40, 1.0) ** 2 == pytest.approx(0.1352338, abs=5e-8)
    assert Yarn(40, 4096, mscale=0.707).temperature() == mscale(40)  # one alone counts for nothing
    assert Yarn(40, 4096, mscale=0.0, mscale_all_dim=1.0).temperature() == mscale(40)  # nor does a zero
    both = Yarn(40, 4096, mscale=0.707, mscale_all_dim=1.0)
    assert both.temperature() == pytest.approx((0.0707 * math.log(40) + 1) / 1.36889, abs=1e-5)
    assert mscale(1) == mscale(0.5) == 1.0


# --- Llama 3, LongRoPE, Gemma 4 (D18b) --------------------------------------------------------


def test_llama3_bands() -> None:
    ratios = angles(Llama3(8, 1, 4, 8192), 5e5, 128) / angles(None, 5e5, 128)
    assert [(ratios == 1).sum(), (ratios == 0.125).sum()] == [29, 29]
    mixed = [0.828168, 0.643743, 0.493507, 0.371122, 0.271425, 0.190211]
    assert np.allclose(ratios[29:35], mixed, atol=1e-6)


def test_llama3_small() -> None:
    """Case P12."""
    frequencies = angles(Llama3(32, 1, 4, 8192), 5e5, 64)
    expected = {
        14: 0.003211446,
        15: 0.001290548,
        16: 0.000429557,
        17: 9.70829e-5,
        18: 1.94616e-5,
        31: 9.41831e-8,
    }
    for pair, value in expected.items():
        assert frequencies[pair] == pytest.approx(value, rel=2e-6)


def test_llama3_without_a_middle_band() -> None:
    """Llama 4 Scout has low = high: every pair is kept or divided."""
    ratios = angles(Llama3(16, 1, 1, 8192), 5e5, 128) / angles(None, 5e5, 128)
    assert set(ratios.tolist()) == {1.0, 0.0625}
    turns = 8192 * inverse_frequencies(5e5, 128) / (2 * math.pi)
    assert ((ratios == 1.0) == (turns >= 1)).all()


def test_longrope() -> None:
    scaling = LongRope((1.0, 2.0), (4.0, 8.0), original=4096, factor=32.0)
    assert np.allclose(angles(scaling, 1e4, 4, 4096), [1, 0.005])
    assert np.allclose(angles(scaling, 1e4, 4, 4097), [0.25, 0.00125])
    for length in (1, 4096, 4097):  # with the short list too
        assert scaling.frequencies(1e4, 4, length)[1] == pytest.approx(1.190238, abs=5e-7)
    assert LongRope((1.0,), (1.0,), 4096, 1.0).frequencies(1e4, 2, 1)[1] == 1.0
    assert LongRope((1.0,), (1.0,), 4096, 32.0, 1.5).frequencies(1e4, 2, 1)[1] == 1.5


def test_proportional_keeps_the_fastest_pairs_of_the_whole_head() -> None:
    frequencies = angles(Proportional(0.25), 1e6, 16)
    assert np.allclose(frequencies[:2], [1, 1e6 ** (-2 / 16)]) and not frequencies[2:].any()


# --- against transformers ---------------------------------------------------------------------


def theirs(theta: float, dims: int, length: int, context: int, **parameters: Any) -> tuple[Any, float]:
    config = transformers.LlamaConfig(
        hidden_size=4 * dims,
        num_attention_heads=4,
        head_dim=dims,
        max_position_embeddings=context,
        rope_parameters={"rope_theta": theta, **parameters},
    )
    compute = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]]
    frequencies, factor = compute(config, torch.device("cpu"), seq_len=length)
    return frequencies.numpy(), factor


def assert_same(
    scaling: Scaling, theta: float, dims: int, length: int, context: int, **parameters: Any
) -> None:
    ours, factor = scaling.frequencies(theta, dims, length)
    expected, expected_factor = theirs(theta, dims, length, context, **parameters)
    assert factor == pytest.approx(expected_factor, rel=1e-9)
    # theirs are computed in fp32 throughout, ours rounded once at the end
    assert np.allclose(ours, expected, rtol=3e-6, atol=0)


thetas = st.sampled_from([100.0, 1e4, 150_000.0, 5e5, 1e6])
sizes = st.integers(2, 64).map(lambda half: 2 * half)
factors = st.sampled_from([1.5, 2.0, 4.0, 8.0, 32.0, 40.0])
originals = st.sampled_from([64, 512, 2048, 4096, 8192, 32768])
lengths = st.integers(1, 100_000)


@given(thetas, sizes, factors)
def test_interpolation_equals_transformers(theta: float, dims: int, factor: float) -> None:
    assert_same(Interpolation(factor), theta, dims, 1, 64, rope_type="linear", factor=factor)


@given(thetas, sizes.filter(lambda d: d > 2), factors, originals, lengths)
def test_dynamic_ntk_equals_transformers(
    theta: float, dims: int, factor: float, original: int, length: int
) -> None:
    scaling = DynamicNTK(factor, original)
    assert_same(scaling, theta, dims, length, original, rope_type="dynamic", factor=factor)


@given(
    thetas,
    sizes,
    factors,
    originals,
    st.booleans(),
    st.sampled_from([None, 0.707, 1.0]),
    st.sampled_from([None, 0.5, 1.0]),
    st.sampled_from([None, 1.0, 1.4852]),
    st.sampled_from([(32.0, 1.0), (8.0, 2.0)]),
)
def test_yarn_equals_transformers(
    theta: float,
    dims: int,
    factor: float,
    original: int,
    truncate: bool,
    mscale: float | None,
    mscale_all_dim: float | None,
    attention_factor: float | None,
    betas: tuple[float, float],
) -> None:
    optional = {"mscale": mscale, "mscale_all_dim": mscale_all_dim, "attention_factor": attention_factor}
    assert_same(
        Yarn(factor, original, *betas, attention_factor, mscale, mscale_all_dim, truncate),
        theta,
        dims,
        1,
        int(original * factor),
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=betas[0],
        beta_slow=betas[1],
        truncate=truncate,
        **{name: value for name, value in optional.items() if value is not None},
    )


@given(thetas, sizes, factors, originals, st.sampled_from([(1.0, 4.0), (0.5, 8.0), (2.0, 3.0)]))
def test_llama3_equals_transformers(
    theta: float, dims: int, factor: float, original: int, band: tuple[float, float]
) -> None:
    assert_same(
        Llama3(factor, *band, original),
        theta,
        dims,
        1,
        131_072,
        rope_type="llama3",
        factor=factor,
        low_freq_factor=band[0],
        high_freq_factor=band[1],
        original_max_position_embeddings=original,
    )


@given(thetas, sizes, factors, originals, lengths, st.sampled_from([None, 1.0, 1.25]), st.data())
def test_longrope_equals_transformers(
    theta: float,
    dims: int,
    factor: float,
    original: int,
    length: int,
    attention_factor: float | None,
    data: st.DataObject,
) -> None:
    divisors = st.lists(st.floats(1.0, 64.0), min_size=dims // 2, max_size=dims // 2)
    short, long = data.draw(divisors), data.draw(divisors)
    explicit = {} if attention_factor is None else {"attention_factor": attention_factor}
    assert_same(
        LongRope(tuple(short), tuple(long), original, factor, attention_factor),
        theta,
        dims,
        length,
        int(original * factor),
        rope_type="longrope",
        factor=factor,
        short_factor=short,
        long_factor=long,
        original_max_position_embeddings=original,
        **explicit,
    )


@given(thetas, sizes, factors, st.sampled_from([0.25, 0.5, 0.75, 1.0]))
def test_proportional_equals_transformers(theta: float, dims: int, factor: float, share: float) -> None:
    assert_same(
        Proportional(share, factor),
        theta,
        dims,
        1,
        64,
        rope_type="proportional",
        factor=factor,
        partial_rotary_factor=share,
    )
