"""ScaleNorm, DyT, DeepNorm; and BatchNorm, with what it breaks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qkv import spec
from qkv.errors import RequestError, UnsupportedError
from qkv.nn import Layout
from qkv.nn.build import build
from qkv.spec import (
    Attention,
    DeepNorm,
    Dense,
    Language,
    LayerNorm,
    Model,
    Stack,
    Tokens,
    post_norm,
    pre_norm,
)
from tests.support import assert_close, random_model, relative


def filled(node: spec.Norm, size: int = 8, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    module = build(node, size)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def test_scale_norm_gives_every_row_one_length() -> None:
    """[3, 4] has length 5: g times (0.6, 0.8)."""
    module = build(spec.ScaleNorm(), 2)
    nn.init.constant_(module.weight, 10.0)
    assert torch.allclose(module(torch.tensor([[3.0, 4.0]])), torch.tensor([[6.0, 8.0]]))
    module, x = filled(spec.ScaleNorm(1e-3)), torch.randn(3, 5, 8)
    assert_close(module(x), module.weight * F.normalize(x, dim=-1, eps=1e-3))
    assert_close(module(7 * x), module(x))


def test_scale_norm_is_finite_at_zero() -> None:
    module, x = filled(spec.ScaleNorm()), torch.zeros(1, 8, requires_grad=True)
    out = module(x)
    out.sum().backward()
    assert (out == 0).all() and x.grad is not None and x.grad.isfinite().all()


def test_dyt_is_a_bounded_line() -> None:
    """scale * tanh(alpha x) + bias; alpha starts at 0.5, as in the paper's section 5."""
    module = build(spec.DyT(), 1)
    assert module.alpha.tolist() == [0.5]
    nn.init.constant_(module.weight, 2.0), nn.init.constant_(module.bias, 1.0)
    values = module(torch.tensor([[0.0], [2.0], [1e9], [-1e9]])).flatten().tolist()
    assert values == pytest.approx([1.0, 1 + 2 * 0.761594, 3.0, -1.0], abs=1e-6)  # tanh(1) = 0.761594
    module, x = filled(spec.DyT()), torch.randn(3, 5, 8)
    assert_close(module(x), module.weight * torch.tanh(module.alpha * x) + module.bias)


@pytest.mark.parametrize("node", [spec.ScaleNorm(), spec.DyT()], ids=["scale", "dyt"])
def test_their_statistics_are_fp32(node: spec.Norm) -> None:
    """The squares of 300 overflow half precision."""
    module = filled(node)
    x = torch.full((1, 8), 300.0)
    out = module.half()(x.half())
    assert out.dtype == torch.float16 and relative(out, module.float()(x)) < 1e-3


def test_batch_norm_equals_torch_in_training_and_after() -> None:
    ours, theirs = filled(spec.BatchNorm(1e-3, 0.2)), nn.BatchNorm1d(8, 1e-3, 0.2)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight), theirs.bias.copy_(ours.bias)
    everywhere = torch.ones(3, 5, dtype=torch.bool)
    for _ in range(3):
        x = 2 * torch.randn(3, 5, 8) + 1
        assert_close(ours(x, everywhere), theirs(x.flatten(0, 1)).view_as(x))
    assert_close(ours.running_mean, theirs.running_mean)
    assert_close(ours.running_variance, theirs.running_var)
    assert_close(ours.eval()(x), theirs.eval()(x.flatten(0, 1)).view_as(x))


def test_batch_norm_counts_only_tokens_that_are_there() -> None:
    module, x = filled(spec.BatchNorm()), torch.randn(2, 6, 8)
    present = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1]]).bool()
    rows = x[present]
    assert_close(module(x, present)[present], module(rows[None], torch.ones(1, 8, dtype=torch.bool))[0])


def test_batch_norm_refuses_what_has_no_statistics() -> None:
    module, x = filled(spec.BatchNorm()), torch.randn(1, 3, 8)
    with pytest.raises(RequestError, match="at least 2 tokens; this batch has 1"):
        module(x, torch.tensor([[True, False, False]]))
    with pytest.raises(UnsupportedError, match="around the steps of a layer"):
        module(x)


def with_batch_norm() -> Model:
    layer = pre_norm(Attention(2, 2, 4, mask=spec.Causal()), Dense("relu", 12), norm=spec.BatchNorm())
    return Model(decoder=Stack(Tokens(20, 8), (layer, layer), spec.BatchNorm()), head=Language(20))


def test_batch_norm_lets_batch_mates_and_the_future_in() -> None:
    """Why Transformers do without it: the invariants that hold for every other norm fail in training.

    Broken: a row equals itself alone; nothing flows from the future. Afterwards, with the running
    averages, both hold.
    """
    tokens = torch.randint(0, 20, (3, 6), generator=torch.Generator().manual_seed(3))
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 20
    for training in (True, False):
        model = random_model(with_batch_norm()).train(training)
        outputs = [model(tokens), model(tokens[:1]), model(changed)]
        batch_mates = relative(outputs[0][:1], outputs[1])
        future = relative(outputs[0][:, :-1], outputs[2][:, :-1])
        if training:
            assert batch_mates > 1e-2 and future > 1e-2
        else:
            assert batch_mates <= 1e-5 and future == 0


def test_padding_does_not_enter_the_statistics_of_a_model_with_batch_norm() -> None:
    model = random_model(with_batch_norm())
    tokens, present = torch.randint(0, 20, (2, 6)), torch.ones(2, 6, dtype=torch.bool)
    present[1, 4:] = False
    before = model(tokens, layout=Layout.padded(present))
    tokens[1, 4:] = (tokens[1, 4:] + 1) % 20
    assert_close(model(tokens, layout=Layout.padded(present))[present], before[present])


def test_the_factors_of_deep_norm() -> None:
    """Wang et al. 2022, figure 2: at 8 layers alone 2 and 1 / sqrt(8); at 6 and 6 as the paper's machine."""
    assert DeepNorm.alone(8) == pytest.approx((2.0, 8**-0.5))
    assert DeepNorm.alone(100) == pytest.approx((3.760603, 0.188030), abs=1e-6)
    encoder, decoder = DeepNorm.pair(6, 6)
    assert encoder == pytest.approx((0.81 * 6 ** (5 / 16), 0.87 * 6 ** (-5 / 16)))
    assert decoder == pytest.approx((18**0.25, 72**-0.25))


def change_by_one_step(factors: DeepNorm, seed: int, depth: int = 32, rate: float = 1e-5) -> float:
    """How far one step of gradient descent moves a post-norm stack's output, relative to it."""
    torch.manual_seed(seed)
    node = post_norm(Attention(2, 2, 8), Dense("relu", 32), skip=factors.skip)
    layers = [build(node, 16) for _ in range(depth)]
    named = [pair for layer in layers for pair in layer.named_parameters()]
    for name, parameter in named:
        if parameter.ndim == 2:
            scaled = "query" not in name and "key" not in name
            nn.init.xavier_normal_(parameter, gain=factors.gain if scaled else 1.0)
        else:
            nn.init.constant_(parameter, float(name.endswith("post.weight")))
    inputs, target, layout = torch.randn(2, 5, 16), torch.randn(2, 5, 16), Layout.unpadded(2, 5)

    def run() -> torch.Tensor:
        x = inputs
        for layer in layers:
            x = layer(x, layout)
        return x

    before = run()
    (before * target).sum().backward()
    with torch.no_grad():
        for _, parameter in named:
            parameter -= rate * parameter.grad
        return float((run() - before).norm() / before.norm())


@pytest.mark.parametrize("seed", range(4))
def test_deep_norm_bounds_how_far_a_step_of_training_moves_a_stack(seed: int) -> None:
    """Wang et al. 2022, section 3: 32 post-norm layers move less than a third as far."""
    plain, deep = change_by_one_step(DeepNorm(1.0, 1.0), seed), change_by_one_step(DeepNorm.alone(32), seed)
    assert deep < plain / 3


def test_a_final_norm_is_what_a_pre_norm_stack_lacks_without_one() -> None:
    """D20: in a pre-norm stack the stream grows; the final norm brings it back to one size."""
    layer = pre_norm(Attention(2, 2, 4, mask=spec.Causal()), Dense("relu", 12), norm=LayerNorm(bias=False))
    model = Model(decoder=Stack(Tokens(20, 8), (layer,) * 6, LayerNorm(scale=False, bias=False)))
    states = random_model(model)(torch.arange(10)[None])
    assert torch.allclose(states.mean(-1), torch.zeros(1, 10), atol=1e-5)
    assert torch.allclose(states.square().mean(-1), torch.ones(1, 10), atol=1e-3)


def test_scale_norm_reaches_down_to_its_bound() -> None:
    """Rows longer than eps, if short, get one length; those below keep a part of it."""
    module = build(spec.ScaleNorm(1e-2), 2)
    nn.init.constant_(module.weight, 1.0)
    x = torch.tensor([[0.03, 0.04], [0.003, 0.004]])
    assert torch.allclose(module(x), torch.tensor([[0.6, 0.8], [0.3, 0.4]]))
