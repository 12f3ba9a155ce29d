"""Small models: what they are made of, and what their first weights are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from qkv import spec
from qkv.claims.models import fan_in, initialise, initialised, small_lm, small_stack, xavier
from qkv.errors import UnsupportedError
from qkv.nn.backends import Reference
from qkv.nn.sdpa import SDPA


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("position", [spec.Learned(8), spec.Sinusoidal()])
def test_positions_of_the_input_go_to_the_input(position: spec.Position) -> None:
    stack = small_stack(11, position=position)
    assert isinstance(stack.input, spec.Tokens) and stack.input.position == position
    assert [mixer.position for mixer in stack.mixers() if isinstance(mixer, spec.Attention)] == [None, None]


@pytest.mark.parametrize("position", [spec.Rotary(), spec.Alibi(), spec.Buckets(), spec.Shaw(4), None])
def test_other_positions_go_to_every_attention(position: spec.Position | None) -> None:
    stack = small_stack(11, layers=3, position=position, mask=spec.Everything())
    assert isinstance(stack.input, spec.Tokens) and stack.input.position is None
    found = [mixer for mixer in stack.mixers() if isinstance(mixer, spec.Attention)]
    assert [(each.position, each.mask) for each in found] == [(position, spec.Everything())] * 3


def test_parts_are_those_that_are_given() -> None:
    attention = spec.Attention(2, 1, 24, spec.Dot(), projections=spec.Projections("qkvo"), value_dim=8)
    layer = small_stack(
        11, width=32, attention=attention, norm=spec.RMSNorm(), mixer=spec.Gated("silu", 20)
    ).layers[0]
    assert layer == spec.pre_norm(attention, spec.Gated("silu", 20), norm=spec.RMSNorm())
    assert small_stack(11, width=32, heads=2).layers[0] == spec.pre_norm(
        spec.Attention(2, 2, 16), spec.Dense("gelu", 128)
    )


def test_only_a_stack_that_is_not_normalised_afterwards_has_a_last_norm() -> None:
    assert small_stack(11).norm == spec.LayerNorm()
    assert small_stack(11, arrange=spec.post_norm).norm is None
    assert small_stack(11, arrange=spec.reordered).norm is not None


def test_the_head_of_a_language_model_is_its_table() -> None:
    model = small_lm(11, width=16, heads=2, layers=1, position=spec.Learned(8))
    # table 176, positions 128, 4 norms of 2 * 16 less one: 3, attention 4 * 256, feed-forward 2 * 1024 + 80
    assert model.parameters() == 176 + 128 + 3 * 32 + 1024 + 2 * 1024 + 80
    network = initialised(model, generator())
    assert network.get_parameter("head.weight") is network.get_parameter("decoder.embedding.weight")
    assert network(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5, 11)


def test_first_weights_keep_the_variance_and_divide_what_ends_a_step() -> None:
    network = initialised(small_lm(512, width=128, layers=8, position=spec.Learned(256)), generator())
    stds = {name: float(p.detach().std()) for name, p in network.named_parameters() if p.ndim > 1}
    for name, std in stds.items():
        ends = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
        expected = network.get_parameter(name).shape[-1] ** -0.5  # 16 steps: a quarter where they end
        assert std == pytest.approx(expected / 4 if ends else expected, rel=0.05), name
    vectors = {name: p for name, p in network.named_parameters() if p.ndim == 1}
    for name, p in vectors.items():
        assert torch.equal(p, torch.full_like(p, float(name.endswith("weight")))), name
    assert any("bias" in name for name in vectors) and any("norm" in name for name in vectors)


@pytest.mark.parametrize(("spread", "expected"), [(fan_in, 64**-0.5), (xavier, (2 / (64 + 256)) ** 0.5)])
def test_spreads(spread: object, expected: float) -> None:
    network = initialised(small_lm(11, width=64), generator(), spread, residual=1)  # type: ignore[arg-type]
    up = network.get_parameter("decoder.layers.0.feed_forward.up.weight")
    assert float(up.detach().std()) == pytest.approx(expected, rel=0.03)
    down = network.get_parameter("decoder.layers.1.feed_forward.down.weight")
    assert float(down.detach().std()) == pytest.approx(spread(down), rel=0.03)  # type: ignore[operator]


def test_weights_depend_on_the_generator_alone() -> None:
    model = small_lm(11, width=16, heads=2)
    one, two, other = (initialised(model, generator(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_norms_start_as_the_identity_whatever_their_offset() -> None:
    network = initialised(small_lm(11, width=16, heads=2, norm=spec.RMSNorm(offset=1)), generator())
    assert torch.equal(network.get_parameter("decoder.norm.weight"), torch.zeros(16))


def test_every_parameter_of_every_position_scheme_and_of_experts_is_filled() -> None:
    experts = spec.Experts(4, 2, spec.Gated("silu", 8), spec.Router(bias=True, gain=True))
    for position in (
        spec.Shaw(4), spec.Buckets(), spec.RelativeSinusoidal(), spec.Rotary(), spec.Alibi(),
    ):  # fmt: skip
        model = small_lm(11, width=16, heads=2, position=position, mixer=experts, norm=spec.DyT())
        network = initialised(model, generator())
        assert all(float(p.detach().abs().max()) < 2 for p in network.parameters())
        assert torch.equal(network.get_parameter("decoder.layers.0.feed_forward.router.gain"), torch.ones(4))
        assert bool(network(torch.randint(11, (2, 6))).isfinite().all())


def test_attention_runs_fused_where_it_can() -> None:
    def backend(position: spec.Position | None) -> object:
        network = initialised(small_lm(11, width=16, heads=2, position=position), generator())
        return network.decoder.layers[0].attention.backend  # type: ignore[union-attr, index]

    assert isinstance(backend(spec.Rotary()), SDPA)
    assert isinstance(backend(spec.Shaw(4)), Reference)  # positions on the values need the weights


def test_modules_of_torch_start_alike() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GRU(64, 64))
    initialise(module, generator(), fan_in)
    assert float(module[0].weight.detach().std()) == pytest.approx(1 / 8, rel=0.05)
    assert float(module[2].weight_hh_l0.detach().std()) == pytest.approx(1 / 8, rel=0.05)
    assert torch.equal(module[1].weight, torch.ones(64)) and torch.equal(module[0].bias, torch.zeros(64))


def test_what_has_first_values_of_its_own_is_refused() -> None:
    model = small_lm(11, width=16, heads=2, norm=spec.ScaleNorm())
    with pytest.raises(UnsupportedError, match="ScaleNorm"):
        initialised(model, generator())
    delta = spec.GatedDelta(key_heads=2, value_heads=2, key_dim=8, value_dim=8)
    layer = spec.pre_norm(delta, spec.Dense("gelu", 16))
    recurrent = replace(model, decoder=replace(small_stack(11, width=16, heads=2), layers=(layer,)))
    with pytest.raises(UnsupportedError, match="GatedDelta has decays"):
        initialised(recurrent, generator())
