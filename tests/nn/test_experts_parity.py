"""Experts equal transformers' own blocks, with the same random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from qkv.nn import Layout
from qkv.nn.build import build
from qkv.spec import ClampedSwish, Experts as Node, Gated, Router
from tests.support import assert_close

WIDTH, HIDDEN = 16, 12
EXPERT = Gated("silu", HIDDEN)


def noisy(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.eval()


def halves(bank: nn.Module) -> dict[str, torch.Tensor]:
    gate, up = bank.gate_up_proj.chunk(2, dim=1)  # type: ignore[union-attr, operator]
    return {"expert.gate.weight": gate, "expert.up.weight": up, "expert.down.weight": bank.down_proj}  # type: ignore[dict-item]


def mlp(prefix: str, module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}.{part}.weight": getattr(module, f"{part}_proj").weight for part in ("gate", "up", "down")
    }


def same(
    node: Node, theirs: nn.Module, weights: dict[str, torch.Tensor], unpack: Any = lambda out: out
) -> None:
    """`weights` are all of our parameters, by our names, out of theirs."""
    ours = build(node, WIDTH)
    ours.load_state_dict({name: tensor.detach() for name, tensor in weights.items()}, strict=True)
    x = torch.randn(3, 7, WIDTH)
    assert_close(ours(x, Layout.unpadded(3, 7)), unpack(theirs(x)).view_as(x), 1e-5)


def test_mixtral() -> None:
    from transformers.models.mixtral import MixtralConfig, modeling_mixtral as theirs

    config = MixtralConfig(
        hidden_size=WIDTH, intermediate_size=HIDDEN, num_local_experts=8, num_experts_per_tok=2
    )
    block = noisy(theirs.MixtralSparseMoeBlock(config))
    same(Node(8, 2, EXPERT), block, {"router.weight": block.gate.weight, **halves(block.experts)})


@pytest.mark.parametrize("normalise", [True, False])
def test_qwen2_moe(normalise: bool) -> None:
    from transformers.models.qwen2_moe import Qwen2MoeConfig, modeling_qwen2_moe as theirs

    config = Qwen2MoeConfig(
        hidden_size=WIDTH, moe_intermediate_size=HIDDEN, shared_expert_intermediate_size=20, num_experts=6,
        num_experts_per_tok=3, norm_topk_prob=normalise,
    )  # fmt: skip
    block = noisy(theirs.Qwen2MoeSparseMoeBlock(config))
    node = Node(6, 3, EXPERT, Router(normalise=normalise), Gated("silu", 20), shared_gate=True)
    weights = {"router.weight": block.gate.weight, **halves(block.experts)}
    weights |= mlp("shared_expert", block.shared_expert)
    same(node, block, weights | {"shared_gate.weight": block.shared_expert_gate.weight})


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
def test_qwen3_moe_and_olmoe(family: str, normalise: bool) -> None:
    from transformers import OlmoeConfig, Qwen3MoeConfig
    from transformers.models.olmoe import modeling_olmoe
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    sizes: dict[str, Any] = {
        "hidden_size": WIDTH, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": normalise,
        "intermediate_size": HIDDEN,
    }  # fmt: skip
    if family == "olmoe":
        block = noisy(modeling_olmoe.OlmoeSparseMoeBlock(OlmoeConfig(**sizes)))
    else:
        config = Qwen3MoeConfig(**sizes, moe_intermediate_size=HIDDEN)
        block = noisy(modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(config))
    node = Node(6, 3, EXPERT, Router(normalise=normalise))
    same(node, block, {"router.weight": block.gate.weight, **halves(block.experts)})


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_deepseek_v2(method: str) -> None:
    from transformers.models.deepseek_v2 import DeepseekV2Config, modeling_deepseek_v2 as theirs

    config = DeepseekV2Config(
        hidden_size=WIDTH, moe_intermediate_size=HIDDEN, n_routed_experts=12, n_shared_experts=2,
        num_experts_per_tok=3, topk_method=method, n_group=4, topk_group=2, routed_scaling_factor=16.0,
        num_attention_heads=4,
    )  # fmt: skip
    block = noisy(theirs.DeepseekV2Moe(config))
    groups = {"groups": 4, "top_groups": 2, "group_best": 1} if method != "greedy" else {}
    node = Node(12, 3, EXPERT, Router(normalise=False, scale=16.0, **groups), Gated("silu", 2 * HIDDEN))  # type: ignore[arg-type]
    weights = {"router.weight": block.gate.weight, **halves(block.experts)}
    same(node, block, weights | mlp("shared_expert", block.shared_experts))


@pytest.mark.parametrize("shift", [0.0, -3.0])
def test_deepseek_v3(shift: float) -> None:
    """Also where every biased score is negative."""
    from transformers.models.deepseek_v3 import DeepseekV3Config, modeling_deepseek_v3 as theirs

    config = DeepseekV3Config(
        hidden_size=WIDTH, moe_intermediate_size=HIDDEN, n_routed_experts=12, n_shared_experts=1,
        num_experts_per_tok=4, n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5,
    )  # fmt: skip
    block = noisy(theirs.DeepseekV3MoE(config))
    nn.init.normal_(block.gate.e_score_correction_bias, shift, 0.3)
    router = Router("sigmoid", scale=2.5, balance=True, groups=4, top_groups=2)
    node = Node(12, 4, EXPERT, router, Gated("silu", HIDDEN))
    weights = {"router.weight": block.gate.weight, "router.balance": block.gate.e_score_correction_bias}
    same(node, block, weights | halves(block.experts) | mlp("shared_expert", block.shared_experts))


def test_gpt_oss() -> None:
    """With weights large enough that the clamps are felt."""
    from transformers.models.gpt_oss import GptOssConfig, modeling_gpt_oss as theirs

    config = GptOssConfig(
        hidden_size=WIDTH, intermediate_size=HIDDEN, num_local_experts=6, num_experts_per_tok=3
    )
    block = noisy(theirs.GptOssMLP(config))
    bank = block.experts
    nn.init.normal_(bank.gate_up_proj, std=3.0)
    up, bias = bank.gate_up_proj.transpose(1, 2), bank.gate_up_proj_bias
    weights = {
        "router.weight": block.router.weight, "router.bias": block.router.bias,
        "expert.gate.weight": up[:, ::2], "expert.up.weight": up[:, 1::2],
        "expert.gate.bias": bias[:, ::2], "expert.up.bias": bias[:, 1::2],
        "expert.down.weight": bank.down_proj.transpose(1, 2), "expert.down.bias": bank.down_proj_bias,
    }  # fmt: skip
    node = Node(6, 3, Gated(ClampedSwish(), HIDDEN, bias=True), Router(bias=True))
    same(node, block, weights, lambda out: out[0])


@pytest.mark.parametrize("top_k", [1, 2])
def test_llama4(top_k: int) -> None:
    from transformers.models.llama4 import Llama4TextConfig, modeling_llama4 as theirs

    config = Llama4TextConfig(
        hidden_size=WIDTH, intermediate_size=HIDDEN, num_local_experts=4, num_experts_per_tok=top_k
    )
    block = noisy(theirs.Llama4TextMoe(config))
    gate, up = block.experts.gate_up_proj.transpose(1, 2).chunk(2, dim=1)
    weights = {
        "router.weight": block.router.weight, "expert.gate.weight": gate, "expert.up.weight": up,
        "expert.down.weight": block.experts.down_proj.transpose(1, 2),
    }  # fmt: skip
    node = Node(4, top_k, EXPERT, Router("sigmoid", normalise=False, scales="input"), EXPERT)
    same(node, block, weights | mlp("shared_expert", block.shared_expert), lambda out: out[0])
