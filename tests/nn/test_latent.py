"""Latent attention against transformers' DeepSeek, and its two forms against each other."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from qkv.errors import UnsupportedError
from qkv.nn import ContiguousCache, Layout, Taps
from qkv.nn.latent import LatentAttention
from qkv.spec import (
    Causal,
    DynamicNTK,
    LatentAttention as Node,
    LogScale,
    RMSNorm,
    Rotary,
    Score,
    Stack,
    Tokens,
    Yarn,
    pre_norm,
)
from tests.support import assert_close

WIDTH, LENGTH = 21, 11
NODE = Node(3, 6, 4, 5, 8, 7, position=Rotary(100.0, pairs="interleaved"), norm=RMSNorm(1e-6))


def latent(node: Node, absorbed: bool = False) -> LatentAttention:
    module = LatentAttention(node, WIDTH)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    module.absorbed = absorbed
    return module


def fill(ours: LatentAttention, theirs: Any) -> None:
    """Theirs interleaves each head's key rows with its value rows."""
    node, up = ours.node, theirs.kv_b_proj.weight.unflatten(0, (ours.node.heads, -1))
    key_up, value_up = up.split([node.head_dim, node.value_dim], 1)
    pairs: dict[str, Any] = {
        "latent.weight": theirs.kv_a_proj_with_mqa.weight,
        "latent_norm.weight": theirs.kv_a_layernorm.weight,
        "key_up.weight": key_up.flatten(0, 1),
        "value_up.weight": value_up.flatten(0, 1),
        "output.weight": theirs.o_proj.weight,
    }
    if node.query_rank is None:
        pairs["query.weight"] = theirs.q_proj.weight
    else:
        pairs["query_down.weight"] = theirs.q_a_proj.weight
        pairs["query_norm.weight"] = theirs.q_a_layernorm.weight
        pairs["query_up.weight"] = theirs.q_b_proj.weight
    if "a" in node.bias:
        pairs["latent.bias"] = theirs.kv_a_proj_with_mqa.bias
        if node.query_rank is not None:
            pairs["query_down.bias"] = theirs.q_a_proj.bias
    if "o" in node.bias:
        pairs["output.bias"] = theirs.o_proj.bias
    ours.load_state_dict(pairs)


def oracle(kind: Any, modeling: Any, **more: Any) -> tuple[Any, Any]:
    config = kind(
        hidden_size=WIDTH, num_attention_heads=3, num_key_value_heads=3, qk_nope_head_dim=6,
        qk_rope_head_dim=4, v_head_dim=5, kv_lora_rank=8, attn_implementation="eager", **more,
    )  # fmt: skip
    name = kind.__name__.removesuffix("Config")
    module = getattr(modeling, f"{name}Attention")(config, 0).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module, getattr(modeling, f"{name}RotaryEmbedding")(config)


def theirs_on(module: Any, angles: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.full((LENGTH, LENGTH), -math.inf).triu(1).expand(len(x), 1, -1, -1)
    places = torch.arange(LENGTH).expand(len(x), -1)
    return module(x, position_embeddings=angles(x, places), attention_mask=hidden)[0]


YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8,
    "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip


@pytest.mark.parametrize("absorbed", [False, True], ids=["expanded", "absorbed"])
@pytest.mark.parametrize("query_rank", [None, 7])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("yarn", [False, True], ids=["plain", "yarn"])
@torch.no_grad()
def test_equals_deepseek_v3(absorbed: bool, query_rank: int | None, interleaved: bool, yarn: bool) -> None:
    rope = YARN if yarn else {"rope_type": "default", "rope_theta": 100.0}
    theirs, angles = oracle(
        DeepseekV3Config, v3, q_lora_rank=query_rank, attention_bias=True,
        rope_interleave=interleaved, rope_parameters=rope,
    )  # fmt: skip
    scaling = Yarn(4.0, 8, 4.0, 1.0, mscale=0.707, mscale_all_dim=0.707) if yarn else None
    position = Rotary(100.0, pairs="interleaved" if interleaved else "half", scaling=scaling)
    warmth = 0.1 * 0.707 * math.log(4) + 1 if yarn else 1.0
    node = replace(
        NODE, query_rank=query_rank, position=position, bias="ao", score=Score(10**-0.5 * warmth**2)
    )
    ours = latent(node, absorbed)
    fill(ours, theirs)
    x = torch.randn(2, LENGTH, WIDTH)
    assert_close(ours(x, Layout.unpadded(2, LENGTH)), theirs_on(theirs, angles, x))


@pytest.mark.parametrize("absorbed", [False, True], ids=["expanded", "absorbed"])
@pytest.mark.parametrize("query_rank", [None, 7])
@torch.no_grad()
def test_equals_deepseek_v2(absorbed: bool, query_rank: int | None) -> None:
    theirs, angles = oracle(
        DeepseekV2Config, v2, q_lora_rank=query_rank,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )  # fmt: skip
    ours = latent(replace(NODE, query_rank=query_rank), absorbed)
    fill(ours, theirs)
    x = torch.randn(2, LENGTH, WIDTH)
    assert_close(ours(x, Layout.unpadded(2, LENGTH)), theirs_on(theirs, angles, x))


@torch.no_grad()
def test_both_forms_are_one_function() -> None:
    """D24b: naive and absorbed agree to rounding, in doubles to 1e-13."""
    module, x, layout = latent(NODE).double(), torch.randn(2, 9, WIDTH).double(), Layout.unpadded(2, 9)
    expanded = module(x, layout)
    module.absorbed = True
    assert_close(module(x, layout).double(), expanded, 1e-6)  # softmax is in fp32
    # without the softmax, which is fp32: scores and mixing alone, in doubles
    content, _ = module.as_queries(x, layout)
    compressed, _ = module.as_latent(x)
    key = module.expanded(compressed, module.key_up)
    scores = content @ key.transpose(-1, -2)
    absorbed = module.into_query(content) @ compressed.transpose(-1, -2)
    assert float((scores - absorbed).abs().max() / scores.abs().max()) < 1e-13
    weights = torch.rand(2, 3, 9, 9).double()
    mixed, late = weights @ module.expanded(compressed, module.value_up), weights @ compressed
    assert float((mixed - module.out_of_latent(late)).abs().max() / mixed.abs().max()) < 1e-13


@pytest.mark.parametrize("absorbed", [False, True], ids=["expanded", "absorbed"])
def test_the_cache_keeps_the_latent_and_one_turned_key(absorbed: bool) -> None:
    """D24b: rank + rotary_dim values a token and layer, whatever the number of heads."""
    module, x = latent(NODE, absorbed), torch.randn(2, 9, WIDTH)
    cache = ContiguousCache(Stack(Tokens(5, WIDTH), (pre_norm(NODE),)), 2, 9)
    with torch.no_grad():
        whole = module(x, Layout.unpadded(2, 9))
        pieces = [
            module(piece, cache.extend(Layout.unpadded(2, piece.shape[1])), cache, "0.attention")
            for piece in x.split([4, 1, 3, 1], 1)
        ]
    assert_close(torch.cat(pieces, 1), whole)
    kept = cache.layers["0.attention"]
    assert [tuple(tensor.shape) for tensor in kept] == [(2, 1, 9, 8), (2, 1, 9, 4)]
    assert cache.bytes == 2 * 9 * (8 + 4) * 4
    both = module.latent(x)
    assert_close(kept[0][:, 0], module.latent_norm(both[..., :8]))
    turned = module.position.turn(both[:, None, :, 8:], Layout.unpadded(2, 9), keys=False)
    assert_close(kept[1], turned)


def test_a_base_that_grows_turns_old_keys_too() -> None:
    """Case P7: what is kept is not turned yet; chunks equal the whole, also past the trained length."""
    node = replace(NODE, position=Rotary(100.0, scaling=DynamicNTK(2.0, 4)))
    module, x = latent(node), torch.randn(1, 9, WIDTH)
    cache = ContiguousCache(Stack(Tokens(5, WIDTH), (pre_norm(node),)), 1, 9)
    for piece in x.split([2, 7], 1):
        last = module(piece, cache.extend(Layout.unpadded(1, piece.shape[1])), cache, "0.attention")
    assert_close(last, module(x, Layout.unpadded(1, 9))[:, 2:])


def test_taps_show_keys_of_heads_or_of_the_shared_head() -> None:
    points = ["query", "key", "value", "scores", "weights", "heads", "output"]
    x, layout = torch.randn(2, 5, WIDTH), Layout.unpadded(2, 5)
    shapes = {}
    values = {}
    for absorbed in (False, True):
        torch.manual_seed(3)
        taps = Taps(points, points)
        latent(NODE, absorbed)(x, layout, tap=taps)
        shapes[absorbed] = {name: tuple(taps[name].shape) for name in points}
        values[absorbed] = {name: taps[name] for name in points}
    same = {"scores": (2, 3, 5, 5), "weights": (2, 3, 5, 5), "heads": (2, 5, 3, 5), "output": (2, 5, WIDTH)}
    assert shapes[False] == {"query": (2, 3, 5, 10), "key": (2, 3, 5, 10), "value": (2, 3, 5, 5)} | same
    assert shapes[True] == {"query": (2, 3, 5, 12), "key": (2, 1, 5, 12), "value": (2, 1, 5, 8)} | same
    for name in ("weights", "heads", "output"):
        assert_close(values[True][name], values[False][name])


def test_the_scale_counts_both_parts_of_a_key() -> None:
    """1 / sqrt(head_dim + rotary_dim) unless another is given; never the rank's, whatever the form."""
    assert latent(NODE).scale == pytest.approx(10**-0.5)
    assert latent(replace(NODE, score=Score(0.25))).scale == 0.25


@pytest.mark.parametrize(
    ("score", "words"),
    [(Score(sink=True), "a sink"), (Score(query_scale=LogScale(4, 0.1)), "queries that grow")],
)
def test_what_it_would_leave_out_is_refused(score: Score, words: str) -> None:
    with pytest.raises(UnsupportedError, match=f"Latent attention with {words} can be described but not run"):
        LatentAttention(replace(NODE, score=score, mask=Causal()), WIDTH)
