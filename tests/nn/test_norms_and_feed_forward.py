"""Norms and feed-forwards: golden values, laws, torch's own modules."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from qkv import spec
from qkv.errors import UnsupportedError
from qkv.nn.build import build
from qkv.nn.feed_forward import activation, gated
from tests.support import assert_close


def norm(node: spec.Norm, size: int = 4) -> torch.nn.Module:
    module = build(node, size)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.fill_(0.0 if name == "bias" or getattr(node, "offset", 0) else 1.0)
    return module


X = torch.tensor([[1.0, 2, 3, 4]])


def test_the_golden_values_of_d21() -> None:
    layer = norm(spec.LayerNorm(eps=0.0))(X)
    assert torch.allclose(layer, torch.tensor([[-1.341641, -0.447214, 0.447214, 1.341641]]), atol=1e-6)
    rms = norm(spec.RMSNorm(eps=0.0))(X)
    assert torch.allclose(rms, torch.tensor([[0.365148, 0.730297, 1.095445, 1.460593]]), atol=1e-6)
    assert torch.allclose(norm(spec.RMSNorm(eps=0.0, offset=1.0))(X), rms)


def test_layer_norm_equals_torch() -> None:
    module = norm(spec.LayerNorm(1e-3), 16)
    torch.nn.init.normal_(module.weight), torch.nn.init.normal_(module.bias)
    x = torch.randn(3, 5, 16)
    assert_close(module(x), F.layer_norm(x, (16,), module.weight, module.bias, 1e-3))


def test_rms_norm_equals_torch() -> None:
    module = norm(spec.RMSNorm(1e-3), 16)
    torch.nn.init.normal_(module.weight)
    x = torch.randn(3, 5, 16)
    assert_close(module(x), F.rms_norm(x, (16,), module.weight, 1e-3))


def test_rms_norm_ignores_scale_but_not_shift() -> None:
    """D21."""
    module = norm(spec.RMSNorm(eps=0.0), 16)
    x = torch.randn(2, 16)
    assert_close(module(7 * x), module(x))
    assert (module(x + 1) - module(x)).abs().max() > 0.1
    both = norm(spec.LayerNorm(eps=0.0), 16)
    assert_close(both(7 * x + 3), both(x), 1e-4)


@pytest.mark.parametrize("node", [spec.RMSNorm(), spec.RMSNorm(offset=1.0), spec.LayerNorm()], ids=str)
def test_statistics_are_fp32(node: spec.Norm) -> None:
    """D21: squares of 300 overflow half precision; the norm does not."""
    x = torch.tensor([[300.0, -300.0] * 4], dtype=torch.float16)
    out = norm(node, 8).half()(x)
    assert out.dtype == torch.float16 and torch.allclose(out.float(), x.float() / 300, atol=1e-3)


def test_llama_rounds_before_it_scales_and_gemma_after() -> None:
    """D21: reduce in fp32, then cast and scale, except where the scale is 1 + w."""
    x = torch.randn(64, 32).bfloat16()
    plain = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    for offset in (0.0, 1.0):
        module = build(spec.RMSNorm(1e-6, offset=offset), 32).bfloat16()
        torch.nn.init.normal_(module.weight)
        early = plain.bfloat16() * (module.weight + offset)
        late = (plain * (module.weight.float() + offset)).bfloat16()
        assert not torch.equal(early, late)
        assert torch.equal(module(x), late if offset else early)


@pytest.mark.parametrize("gate", ["sigmoid", "relu", "gelu", "identity"])
def test_every_gated_unit_is_its_formula(gate: str) -> None:
    """D22: GLU, ReGLU, GEGLU and Bilinear."""
    module = build(spec.Gated(gate, 6), 4)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    functions = {"sigmoid": torch.sigmoid, "relu": F.relu, "gelu": F.gelu, "identity": lambda x: x}
    x = torch.randn(5, 4)
    hidden = functions[gate](x @ module.gate.weight.T) * (x @ module.up.weight.T)
    assert_close(module(x), hidden @ module.down.weight.T)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gelu", 0.841345),
        ("gelu_tanh", 0.841192),
        ("quick_gelu", 0.845796),
        ("silu", 0.731059),
        ("relu2", 1.0),
    ],
)
def test_activations_at_one(name: str, value: float) -> None:
    """D22; 1 / (1 + e^-1.702) = 0.845796."""
    assert float(activation(name)(torch.ones(()))) == pytest.approx(value, abs=1e-6)


def test_squared_relu() -> None:
    """So et al. 2021: max(0, x)^2, not x^2 and not max(0, x)."""
    assert activation("relu2")(torch.tensor([-3.0, 0, 0.5, 3])).tolist() == [0, 0, 0.25, 9]


def test_a_clamped_swish() -> None:
    """gpt-oss: the gate bounded above only, `up` on both sides and moved by 1.

    At (1, 1): sigmoid(1.702) * 2. At (10, -9): 7 * sigmoid(11.914) * (-7 + 1). At (-10, 9):
    -10 * sigmoid(-17.02) * 8.
    """
    swish = spec.ClampedSwish()
    gate, up = torch.tensor([1.0, 10, -10]), torch.tensor([1.0, -9, 9])
    expected = [1.691591, -41.999718, -3.246369e-6]
    assert gated(swish, gate, up).tolist() == pytest.approx(expected, rel=1e-5)
    assert_close(gated(spec.ClampedSwish(1.0, 1e9, 0.0), gate, up), F.silu(gate) * up)


@pytest.mark.parametrize("kind", [spec.Dense, spec.Gated])
def test_an_unknown_activation_is_refused_when_it_is_built(kind: type[spec.Dense] | type[spec.Gated]) -> None:
    with pytest.raises(UnsupportedError, match="The activation swoosh is not known"):
        build(kind("swoosh", 6), 4)


def test_the_two_gelus_differ_by_at_most_4_74e_4() -> None:
    """D22: the largest difference, 4.7324e-4, is at |x| = 2.699."""
    x = torch.linspace(-6, 6, 120_001, dtype=torch.float64)
    gap = (activation("gelu")(x) - activation("gelu_tanh")(x)).abs()
    assert float(gap.max()) == pytest.approx(4.7324e-4, abs=1e-8)
    assert abs(float(x[gap.argmax()])) == pytest.approx(2.699, abs=1e-3)


def test_a_gated_feed_forward_is_its_formula() -> None:
    module = build(spec.Gated("silu", 6), 4)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 3, 4)
    up, gate, down = module.up.weight, module.gate.weight, module.down.weight
    assert_close(module(x), (F.silu(x @ gate.T) * (x @ up.T)) @ down.T)


@pytest.mark.parametrize(
    ("width", "multiple", "factor", "hidden"),
    [
        (4096, 256, 1, 11008),
        (5120, 256, 1, 13824),
        (8192, 256, 1, 22016),
        (8192, 4096, 1.3, 28672),
        (4096, 1024, 1.3, 14336),
    ],
)
def test_two_thirds_of_four_widths_rounded_up(width: int, multiple: int, factor: float, hidden: int) -> None:
    """D22: the hidden sizes of Llama come from this rule, and gated at 8d/3 costs what ungated at 4d does."""
    wanted = int(int(2 * 4 * width / 3) * factor)
    assert -(-wanted // multiple) * multiple == hidden
    gated = sum(t.size for t in spec.Gated("silu", 8 * 384 // 3).tensors(384))
    assert gated == sum(t.size for t in spec.Dense("relu", 4 * 384, bias=False).tensors(384))
