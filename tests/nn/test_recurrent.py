"""Mixers with a state against transformers' torch paths, against closed forms, and over padded rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import Mamba2Config, NemotronHConfig, Qwen3NextConfig
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextGatedDeltaNet,
    torch_recurrent_gated_delta_rule,
)

from qkv.errors import ConfigError
from qkv.nn import ContiguousCache, Layout, Taps
from qkv.nn.recurrent import Convolution, GatedDelta, Recurrent, Sequences, StateSpace, unit
from qkv.spec import GatedDelta as DeltaNode, RMSNorm, Stack, StateSpace as SpaceNode, Tokens, pre_norm
from tests.support import assert_close

WIDTH = 12
DELTA = DeltaNode(2, 6, 5, 7, convolution=3)
SPACE = SpaceNode(6, 4, 5, groups=2)


def filled(module: Any, std: float = 0.5) -> Any:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module


def delta(node: DeltaNode = DELTA) -> GatedDelta:
    return filled(GatedDelta(node, WIDTH))


def space(node: SpaceNode = SPACE) -> StateSpace:
    return filled(StateSpace(node, WIDTH))


BOTH = pytest.mark.parametrize("make", [delta, space])


def like_qwen(ours: GatedDelta, theirs: Any) -> None:
    """Theirs keeps query, key, values and gates of a key head side by side."""
    node = ours.node
    values = node.value_heads // node.key_heads * node.value_dim
    parts = theirs.in_proj_qkvz.weight.unflatten(0, (node.key_heads, -1))
    query, key, value, gate = parts.split([node.key_dim, node.key_dim, values, values], 1)
    beta, decay = theirs.in_proj_ba.weight.unflatten(0, (node.key_heads, -1)).chunk(2, 1)
    weights = {"query": query, "key": key, "value": value, "gate": gate, "beta": beta, "decay": decay}
    ours.load_state_dict(
        {f"{name}.weight": weight.flatten(0, 1) for name, weight in weights.items()}
        | {
            "convolution.weight": theirs.conv1d.weight[:, 0],
            "decay_bias": theirs.dt_bias,
            "decay_log": theirs.A_log,
            "norm.weight": theirs.norm.weight,
            "output.weight": theirs.out_proj.weight,
        }
    )


@pytest.mark.parametrize("key_heads", [1, 2, 6])
@torch.no_grad()
def test_gated_delta_equals_qwen3_next_in_chunks(key_heads: int) -> None:
    """Their chunked form, 64 tokens at a time, against a walk over 150 tokens."""
    config = Qwen3NextConfig(
        hidden_size=WIDTH, linear_num_key_heads=key_heads, linear_num_value_heads=6,
        linear_key_head_dim=5, linear_value_head_dim=7, linear_conv_kernel_dim=3,
        num_hidden_layers=1, layer_types=["linear_attention"], rms_norm_eps=1e-6,
    )  # fmt: skip
    theirs, ours = filled(Qwen3NextGatedDeltaNet(config, 0)), delta(replace(DELTA, key_heads=key_heads))
    like_qwen(ours, theirs)
    x = torch.randn(2, 150, WIDTH)
    assert_close(ours(x, Layout.unpadded(2, 150)), theirs(x))


@torch.no_grad()
def test_gated_delta_and_its_state_equal_the_recurrent_form() -> None:
    """The same from given queries, keys and values, token by token, and the state it ends in."""
    ours, x = delta(), torch.randn(2, 9, WIDTH)
    rows = Sequences.of(Layout.unpadded(2, 9))
    mixed = ours.activation(ours.convolution(ours.inputs(x), None, rows.lengths)[0])
    query, key, value = (
        t.unflatten(-1, (n, -1)) for t, n in zip(mixed.split([10, 10, 42], -1), (2, 2, 6), strict=True)
    )
    decay = -ours.decay_log.exp() * F.softplus(ours.decay(x) + ours.decay_bias)
    out, state = torch_recurrent_gated_delta_rule(
        query,
        key,
        value,
        decay,
        ours.beta(x).sigmoid(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    heads, ended = ours.walk(x, mixed, rows.present, None)
    expected = ours.norm(out) * F.silu(ours.gate(x)).view_as(out)
    assert_close(heads, expected)
    assert_close(ended, state)


def like_mamba(ours: StateSpace, theirs: Any) -> None:
    node = ours.node
    values, shared = node.heads * node.head_dim, node.groups * node.state
    parts = theirs.in_proj.weight.split([values, values, shared, shared, node.heads])
    weights = dict(zip(("gate", "value", "key", "query", "decay"), parts, strict=True))
    filled = {f"{name}.weight": weight for name, weight in weights.items()}
    if node.convolution_bias:
        filled["convolution.bias"] = theirs.conv1d.bias
    ours.load_state_dict(
        filled
        | {
            "convolution.weight": theirs.conv1d.weight[:, 0],
            "decay_bias": theirs.dt_bias,
            "decay_log": theirs.A_log,
            "skip": theirs.D,
            "norm.weight": theirs.norm.weight.unflatten(0, (node.groups, -1)),
            "output.weight": theirs.out_proj.weight,
        }
    )


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_state_space_equals_mamba2(groups: int, bias: bool) -> None:
    """Their scan, 16 tokens a chunk, against a walk over 50."""
    config = Mamba2Config(
        hidden_size=WIDTH, num_heads=6, head_dim=4, expand=2, state_size=5, n_groups=groups, conv_kernel=3,
        use_conv_bias=bias, use_bias=False, chunk_size=16, layer_norm_epsilon=1e-6, num_hidden_layers=1,
    )  # fmt: skip
    theirs = filled(Mamba2Mixer(config, 0)).eval()
    ours = space(replace(SPACE, groups=groups, convolution=3, convolution_bias=bias))
    like_mamba(ours, theirs)
    x = torch.randn(2, 50, WIDTH)
    assert_close(ours(x, Layout.unpadded(2, 50)), theirs(x))


@torch.no_grad()
def test_state_space_equals_nemotron_h() -> None:
    config = NemotronHConfig(
        hidden_size=WIDTH, mamba_num_heads=6, mamba_head_dim=4, ssm_state_size=5, n_groups=2, conv_kernel=4,
        use_conv_bias=True, use_bias=False, chunk_size=16, layer_norm_epsilon=1e-5, time_step_min=0.0,
        layers_block_type=["mamba"],
    )  # fmt: skip
    theirs = filled(NemotronHMamba2Mixer(config, 0)).eval()
    ours = space(replace(SPACE, norm=RMSNorm(1e-5)))
    like_mamba(ours, theirs)
    x = torch.randn(2, 50, WIDTH)
    assert_close(ours(x, Layout.unpadded(2, 50)), theirs(x))


@torch.no_grad()
def test_a_state_space_is_attention_with_weights_that_fade() -> None:
    """Dao and Gu 2024, section 3: out_i = sum over j <= i of (q_i . k_j) exp(decays in (j, i]) t_j v_j."""
    ours, x = space(replace(SPACE, groups=1)), torch.randn(1, 8, WIDTH)
    rows = Sequences.of(Layout.unpadded(1, 8))
    mixed = ours.activation(ours.convolution(ours.inputs(x), None, rows.lengths)[0])
    value, key, query = mixed[0].split([24, 5, 5], -1)
    step = F.softplus(ours.decay(x[0]) + ours.decay_bias)  # (length, heads)
    total = (-ours.decay_log.exp() * step).cumsum(0).T  # (heads, length)
    fading = (total[:, :, None] - total[:, None]).exp().tril()
    weights = fading * (query @ key.T) * step.T[:, None]
    value = value.unflatten(-1, (6, -1)).transpose(0, 1)
    out = (weights @ value + ours.skip[:, None, None] * value).transpose(0, 1)
    gated = out.flatten(-2) * F.silu(ours.gate(x[0]))
    expected = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + 1e-6) * ours.norm.weight[0]
    heads, _ = ours.walk(x, mixed, rows.present, None)
    assert_close(heads[0].flatten(-2), expected)


def test_the_delta_rule_corrects_what_a_key_holds() -> None:
    """Without forgetting and with a full step, a key written twice holds the second value; unlike a sum."""
    node = DeltaNode(1, 1, 2, 2, convolution=1, activation="identity")
    module = filled(GatedDelta(node, 2))
    with torch.no_grad():
        module.decay_log.fill_(-40.0)  # a = 1
        module.beta.weight.copy_(torch.tensor([[40.0, 40.0]]))  # b = 1
    mixed = torch.tensor(
        [[[1.0, 0, 1, 0, 3, 4], [1, 0, 1, 0, 5, 6], [0, 1, 0, 1, 7, 8]]]
    )  # query, key, value
    _, state = module.walk(torch.ones(1, 3, 2), mixed, torch.ones(1, 3, dtype=torch.bool), None)
    assert state[0, 0].flatten().tolist() == pytest.approx([5, 6, 7, 8], rel=1e-5)


def test_a_convolution_mixes_each_channels_last_values() -> None:
    convolution = Convolution(1, 3)
    convolution.weight.data = torch.tensor([[100.0, 10.0, 1.0]])
    x = torch.tensor([1.0, 2, 3, 4]).view(1, 4, 1)
    mixed, kept = convolution(x, None, torch.tensor([4]))
    assert mixed.flatten().tolist() == [1, 12, 123, 234]
    assert kept.flatten().tolist() == [3, 4]
    mixed, kept = convolution(x, kept, torch.tensor([1]))  # only the first is there
    assert mixed.flatten()[0] == 341 and kept.flatten().tolist() == [4, 1]


def test_a_unit_vector_has_length_one_and_zero_stays() -> None:
    assert unit(torch.tensor([3.0, 4.0])).tolist() == pytest.approx([0.6, 0.8])
    assert unit(torch.zeros(2)).tolist() == [0, 0]


# --- rows, padding, documents -----------------------------------------------------------------


def test_sequences_stand_at_the_left_and_go_back() -> None:
    present = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]])
    rows = Sequences.of(Layout.padded(present))
    assert rows.lengths.tolist() == [2, 0, 3] and rows.longest == 3
    x = torch.arange(12.0).view(3, 4, 1) + 1
    lined = rows.lined(x)
    assert lined[..., 0].tolist() == [[2, 3, 0], [0, 0, 0], [9, 11, 12]]
    assert rows.present.tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert rows.back(lined)[..., 0].tolist() == (x[..., 0] * present).tolist()


def test_documents_are_sequences_of_their_own_also_where_they_interleave() -> None:
    layout = Layout.packed([3, 1, 2])
    assert Sequences.of(layout).lined(torch.arange(6.0).view(1, 6))[:3].tolist() == [
        [0, 1, 2], [3, 0, 0], [4, 5, 0]
    ]  # fmt: skip
    documents = torch.tensor([[7, 9, 7, 9, 7]])
    layout = Layout(torch.tensor([[0, 0, 1, 1, 2]]), torch.tensor([[0, 0, 1, 1, 2]]), documents, documents)
    rows = Sequences.of(layout)
    assert rows.lined(torch.arange(5.0).view(1, 5)).tolist() == [[0, 2, 4], [1, 3, 0]]
    assert rows.back(rows.lined(torch.arange(5.0).view(1, 5))).tolist() == [[0, 1, 2, 3, 4]]


def cache_for(module: Recurrent, batch: int, capacity: int) -> ContiguousCache:
    return ContiguousCache(Stack(Tokens(5, WIDTH), (pre_norm(module.node),)), batch, capacity)  # type: ignore[arg-type]


@BOTH
@torch.no_grad()
def test_padded_prompts_then_single_tokens_equal_each_row_alone(make: Any) -> None:
    """Padding on either side, between, and a row that ends early and later goes on."""
    module, x = make(), torch.randn(4, 12, WIDTH)
    present = torch.ones(4, 12, dtype=torch.bool)
    present[0, 5:8] = False  # right padding behind the prompt
    present[1, :6] = False  # left padding
    present[2, 2:4] = False  # a gap
    present[3, 8:11] = False  # nothing for three calls
    cache, outputs = cache_for(module, 4, 12), []
    for piece in (slice(0, 8), *(slice(i, i + 1) for i in range(8, 12))):
        layout = cache.extend(Layout.padded(present[:, piece]))
        outputs.append(module(x[:, piece], layout, cache, "0.mixer"))
    together = torch.cat(outputs, 1)
    for row in range(4):
        alone = module(x[row : row + 1, present[row]], Layout.unpadded(1, int(present[row].sum())))
        assert_close(together[row, present[row]], alone[0])
        assert (together[row, ~present[row]] == 0).all()


@BOTH
@torch.no_grad()
def test_a_call_of_padding_alone_changes_no_state(make: Any) -> None:
    module, x = make(), torch.randn(2, 5, WIDTH)
    cache = cache_for(module, 2, 8)
    module(x, cache.extend(Layout.unpadded(2, 5)), cache, "0.mixer")
    before = cache.state("0.mixer")
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    out = module(x[:, :3], cache.extend(Layout.padded(nothing)), cache, "0.mixer")
    assert before is not None and (out == 0).all()
    assert all(torch.equal(a, b) for a, b in zip(before, cache.state("0.mixer") or (), strict=True))


@BOTH
def test_padding_gives_no_gradient_and_none_is_nan(make: Any) -> None:
    module, x = make(), torch.randn(2, 6, WIDTH, requires_grad=True)
    present = torch.ones(2, 6, dtype=torch.bool)
    present[0, :2], present[1] = False, False
    module(x, Layout.padded(present)).square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    assert (x.grad[~present] == 0).all() and (x.grad[present] != 0).any(-1).all()
    assert all(p.grad.isfinite().all() for p in module.parameters())


@BOTH
@torch.no_grad()
def test_the_state_is_fp32_in_a_half_precision_model_and_no_larger_with_length(make: Any) -> None:
    """Its values are those `state_values` counts; the convolution's inputs stay in the model's type."""
    module = make().bfloat16()
    sizes = []
    for length in (3, 40):
        cache = cache_for(module, 2, length)
        x = torch.randn(2, length, WIDTH).bfloat16()
        out = module(x, cache.extend(Layout.unpadded(2, length)), cache, "0.mixer")
        state, inputs = cache.state("0.mixer") or ()
        assert (out.dtype, state.dtype, inputs.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
        assert (state.numel() // 2, inputs.numel() // 2) == module.node.state_values()
        sizes.append(cache.bytes)
    assert sizes[0] == sizes[1] == 2 * (4 * module.node.state_values()[0] + 2 * module.node.state_values()[1])


@BOTH
@torch.no_grad()
def test_half_precision_is_near_full(make: Any) -> None:
    module, x = make(), torch.randn(2, 30, WIDTH)
    full = module(x, Layout.unpadded(2, 30))
    half = module.bfloat16()(x.bfloat16(), Layout.unpadded(2, 30))
    assert_close(half, full, 2e-2)


@BOTH
@torch.no_grad()
def test_taps(make: Any) -> None:
    module, x, points = make(), torch.randn(2, 4, WIDTH), ["heads", "output"]
    taps = Taps(points, points)
    out = module(x, Layout.unpadded(2, 4), tap=taps)
    assert taps["heads"].shape == (2, 4, 6, module.norm.weight.numel() // (1 if make is delta else 6))
    assert torch.equal(taps["output"], out)
    assert_close(module.output(taps["heads"].flatten(-2)), out)
    silent = module(x, Layout.unpadded(2, 4), tap=Taps({"heads": torch.zeros_like(taps["heads"])}, points))
    assert (silent == 0).all()


def test_heads_that_cannot_share_evenly_are_refused() -> None:
    with pytest.raises(ConfigError, match="6 value heads cannot share 4 key heads evenly"):
        GatedDelta(replace(DELTA, key_heads=4), WIDTH)
    with pytest.raises(ConfigError, match="6 heads cannot be put into 4 groups evenly"):
        StateSpace(replace(SPACE, groups=4), WIDTH)
