"""Residual steps in every arrangement, and gates on them, against torch, transformers and the formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import Dinov2Config
from transformers.models.dinov2.modeling_dinov2 import Dinov2Layer

from qkv.nn import Layout
from qkv.nn.layers import Gate as GateModule, Layer
from qkv.spec import (
    Attention,
    Branch,
    Dense,
    Everything,
    Gate,
    Gated,
    Layer as Node,
    LayerNorm,
    Projections,
    RMSNorm,
    Sublayer,
    parallel,
    post_norm,
    pre_norm,
    reordered,
    sandwich,
    step,
)
from tests.support import assert_close

WIDTH, LAYOUT = 12, Layout.unpadded(2, 7)
LOOKING = Attention(3, 3, 4, mask=Everything(), projections=Projections(bias="qkvo"))
DENSE = Dense("relu", 20)


def layer(node: Node) -> Any:
    module = Layer(node, WIDTH)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


def some() -> torch.Tensor:
    return torch.randn(2, 7, WIDTH)


def of_attention(theirs: Any, name: str) -> dict[str, torch.Tensor]:
    """torch's fused projections under this module's names."""
    weights, biases = theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3)
    parts: dict[str, torch.Tensor] = {}
    for part, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
        parts |= {f"{name}.{part}.weight": weight, f"{name}.{part}.bias": bias}
    out = theirs.out_proj
    return parts | {f"{name}.output.weight": out.weight, f"{name}.output.bias": out.bias}


def pair(ours: str, theirs: Any) -> dict[str, torch.Tensor]:
    return {f"{ours}.weight": theirs.weight, f"{ours}.bias": theirs.bias}


@pytest.mark.parametrize("first", [True, False], ids=["pre", "post"])
@torch.no_grad()
def test_pre_and_post_norm_equal_torch(first: bool) -> None:
    theirs = nn.TransformerEncoderLayer(WIDTH, 3, 20, 0.0, batch_first=True, norm_first=first)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.4)
    slot = "before" if first else "post"
    ours = layer((pre_norm if first else post_norm)(LOOKING, DENSE))
    ours.load_state_dict(
        of_attention(theirs.self_attn, "attention")
        | pair("feed_forward.up", theirs.linear1)
        | pair("feed_forward.down", theirs.linear2)
        | pair(f"attention_{slot}", theirs.norm1)
        | pair(f"feed_forward_{slot}", theirs.norm2)
    )
    x = some()
    assert_close(ours(x, LAYOUT), theirs(x))


def parts_of(module: Any) -> tuple[Any, Any]:
    return (lambda x: module.attention(x, LAYOUT)), module.feed_forward


@torch.no_grad()
def test_arrangements_are_their_formulas() -> None:
    x, norm, mixers = some(), RMSNorm(), (LOOKING, DENSE)
    module = layer(sandwich(*mixers, norm=norm))
    attend, feed = parts_of(module)
    middle = x + module.attention_after(attend(module.attention_before(x)))
    expected = middle + module.feed_forward_after(feed(module.feed_forward_before(middle)))
    assert_close(module(x, LAYOUT), expected)

    module = layer(reordered(*mixers, norm=norm))
    attend, feed = parts_of(module)
    middle = x + module.attention_after(attend(x))
    assert_close(module(x, LAYOUT), middle + module.feed_forward_after(feed(middle)))

    module = layer(parallel(*mixers, norm=norm))
    attend, feed = parts_of(module)
    once = module.attention_before(x)
    assert_close(module(x, LAYOUT), x + attend(once) + feed(once))

    module = layer(parallel(*mixers, norm=norm, norms=2))
    attend, feed = parts_of(module)
    expected = x + attend(module.attention_norm(x)) + feed(module.feed_forward_norm(x))
    assert_close(module(x, LAYOUT), expected)


@torch.no_grad()
def test_deep_norm_weighs_what_is_skipped() -> None:
    """Wang et al. 2022: norm(alpha x + F(x)), alpha = (2 N)^(1/4) for a decoder of N layers."""
    alpha, x = (2 * 8) ** 0.25, some()
    module = layer(post_norm(LOOKING, skip=alpha))
    assert alpha == 2.0
    mixed = 2 * x + module.attention(x, LAYOUT)
    expected = F.layer_norm(mixed, (WIDTH,), module.attention_post.weight, module.attention_post.bias)
    assert_close(module(x, LAYOUT), expected)


@torch.no_grad()
def test_a_step_of_several_branches_uses_every_slot() -> None:
    """post(skip * x + gate * scale * after(sum of branch_i(norm_i(before(x))))), by hand."""
    branches = (Branch(LOOKING, LayerNorm()), Branch(DENSE, RMSNorm()), Branch(Gated("silu", 9)))
    slots: dict[str, Any] = {"before": RMSNorm(), "after": LayerNorm(), "post": RMSNorm()}
    module = layer(Node((Sublayer(branches, skip=1.3, scale=0.6, gate=Gate("channel", "sigmoid"), **slots),)))
    x = some()
    read = module.attention_before(x)
    total = module.attention(module.attention_norm(read), LAYOUT)
    total = total + module.feed_forward(module.feed_forward_norm(read)) + module.feed_forward_2(read)
    added = torch.sigmoid(module.attention_gate.weight) * 0.6 * module.attention_after(total)
    assert_close(module(x, LAYOUT), module.attention_post(1.3 * x + added))


# --- gates ------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_closed_gate_leaves_the_stream_as_it_is() -> None:
    """Flamingo (Alayrac et al. 2022, section 2.2): at tanh(0) the layer is the identity, to the bit."""
    gate = Gate(activation="tanh")
    module = layer(Node(tuple(step(mixer, before=LayerNorm(), gate=gate) for mixer in (LOOKING, DENSE))))
    x = some()
    for part in (module.attention_gate, module.feed_forward_gate):
        assert part.weight.shape == (1,)
        part.weight.fill_(0.0)
    assert torch.equal(module(x, LAYOUT), x)
    module.attention_gate.weight.fill_(0.7)
    expected = x + math.tanh(0.7) * module.attention(module.attention_before(x), LAYOUT)
    assert_close(module(x, LAYOUT), expected)


def test_a_closed_gate_learns_and_what_it_closes_does_not_yet() -> None:
    module = layer(Node((step(LOOKING, before=LayerNorm(), gate=Gate(activation="tanh")),)))
    nn.init.zeros_(module.attention_gate.weight)
    module(some(), LAYOUT).square().sum().backward()
    assert (module.attention_gate.weight.grad != 0).all()
    assert (module.attention.value.weight.grad == 0).all()


@torch.no_grad()
def test_layer_scale_equals_dinov2() -> None:
    """Touvron et al. 2021 (CaiT): one weight a channel, on what a step adds."""
    config = Dinov2Config(
        hidden_size=WIDTH, num_attention_heads=3, mlp_ratio=2, hidden_act="gelu", layer_norm_eps=1e-6,
        attn_implementation="eager",
    )  # fmt: skip
    theirs = Dinov2Layer(config).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.4)
    slots: dict[str, Any] = {"before": LayerNorm(1e-6), "gate": Gate("channel")}
    ours = layer(Node((step(LOOKING, **slots), step(Dense("gelu", 24), **slots))))
    names = dict(theirs.named_parameters())
    found = {name: names.pop(next(n for n in names if n.endswith(end))) for name, end in DINO.items()}
    assert not names
    ours.load_state_dict(found)
    x = some()
    out = theirs(x)
    assert_close(ours(x, LAYOUT), out if isinstance(out, torch.Tensor) else out[0])


DINO = {
    f"{ours}.{part}": f"{theirs}.{part}"
    for ours, theirs in {
        "attention_before": "norm1",
        "attention.query": "q_proj",
        "attention.key": "k_proj",
        "attention.value": "v_proj",
        "attention.output": "o_proj",
        "feed_forward_before": "norm2",
        "feed_forward.up": "fc1",
        "feed_forward.down": "fc2",
    }.items()
    for part in ("weight", "bias")
} | {"attention_gate.weight": "layer_scale1.lambda1", "feed_forward_gate.weight": "layer_scale2.lambda1"}


@torch.no_grad()
def test_a_gate_keeps_the_streams_type() -> None:
    """A gate kept in fp32 inside a half-precision model."""
    gate = GateModule(Gate("channel", "tanh"), 3)
    gate.weight.copy_(torch.tensor([0.0, 1.0, -1.0]))
    out = gate(torch.ones(2, 3, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    assert out[0].tolist() == pytest.approx([0, math.tanh(1), -math.tanh(1)], rel=4e-3)
