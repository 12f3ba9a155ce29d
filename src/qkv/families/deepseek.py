"""DeepSeek V2 to V3.2, Moonshot's Kimi K2 and GLM-5: a latent for the cache, many small experts.

DeepSeek-AI 2024 (V2, section 2.1: MLA; V3, section 2.1.2: a bias that only chooses) and 2025 (V3.2:
an indexer that chooses which keys a query sees; in GLM-5.2 most layers see what another chose).
"""

from __future__ import annotations

import math
from dataclasses import replace

from qkv.errors import ConfigError
from qkv.families.config import Config, shown
from qkv.families.decoder_parts import MOST_LAYERS, expected
from qkv.families.family import Description, Family
from qkv.families.llama import EXPERTS, names
from qkv.families.positions import MOST_POSITIONS, rotary
from qkv.families.rotary_decoders import Sizes, decoder, experts, extended, gated, sizes
from qkv.families.weights import Place, Table, fused
from qkv.spec import Experts, Gated, Indexer, LatentAttention, RMSNorm, Router, Score, Yarn, pre_norm
from qkv.spec.rotary import mscale

SCORES = {"softmax": "softmax", "sigmoid": "sigmoid"}
# how the chosen groups are ranked: by their best score, or by the sum of the two best biased ones
CHOICES = {"greedy": None, "group_limited_greedy": 1, "noaux_tc": 2}
FEED_FORWARDS = {"dense": False, "sparse": True, 0: False, 1: True}
INDEXERS, INDEXERS_SHORT = {"full": True, "shared": False}, {"F": "full", "S": "shared"}


def describe(config: Config) -> Description:
    """From a configuration of a model type in `FAMILY`."""
    size, norm = sizes(config), RMSNorm(config.positive("rms_norm_eps", 1e-6))
    mixer = _attention(config, size)
    size = extended(config, size, mixer.position)
    dense = gated(config)
    routed, sparse = routed_experts(config, dense), sparse_layers(config, size.depth)
    mixers = [replace(mixer, indexer=indexer) for indexer in _indexers(config, size.depth)]
    expected(config, moe_layer_freq=1)
    config.discard("ep_size", "aux_loss_alpha", "seq_aux", "moe_router_dtype")  # of training
    layers = (
        pre_norm(own, routed if routes else dense, norm=norm)
        for own, routes in zip(mixers, sparse, strict=True)
    )
    found = decoder(config, size, layers, norm, irrelevant=_guessing_ahead(config, size.depth))
    return found.named(_names(mixer.heads), "model.")


def sparse_layers(config: Config, depth: int) -> list[bool]:
    """Which layers have experts: all but the first ones, where the file does not name each."""
    first = config.take("first_k_dense_replace", int, 0)
    named = config.each("mlp_layer_types", FEED_FORWARDS, depth, "layers")
    return named or [i >= first for i in range(depth)]


def _indexers(config: Config, depth: int) -> list[Indexer | None]:
    """What chooses the keys of each layer: nothing before V3.2, where the keys of it are unknown."""
    top_k = config.size("index_topk", None, most=MOST_POSITIONS)
    if top_k is None:
        return [None] * depth
    turns = config.take("indexer_rope_interleave", bool, False)
    own = Indexer(
        config.size("index_n_heads"),
        config.size("index_head_dim"),
        top_k,
        "interleaved" if turns else "half",
    )
    pattern = config.take("index_topk_pattern", (str, list), None)
    if pattern is not None and "indexer_types" not in config:
        config.put("indexer_types", [INDEXERS_SHORT.get(name, name) for name in pattern])
    every, start = config.size("index_topk_freq", 1), config.take("index_skip_topk_offset", int, 2)
    config.discard("index_share_for_mtp_iteration")  # of the layers that guess ahead
    owns = config.each("indexer_types", INDEXERS, depth, "layers")
    owns = owns or [max(i - start + 1, 0) % every == 0 for i in range(depth)]
    if not owns[0]:
        raise ConfigError(f"{config.at('indexer_types')} begins with a layer that has no choice to share.")
    return [own if owns_it else replace(own, own=False) for owns_it in owns]


def _names(heads: int) -> Table:
    parts: dict[str, str | Place] = {
        "attention.query_down": "self_attn.q_a_proj",
        "attention.query_norm": "self_attn.q_a_layernorm",
        "attention.query_up": "self_attn.q_b_proj",
        "attention.latent": "self_attn.kv_a_proj_with_mqa",
        "attention.latent_norm": "self_attn.kv_a_layernorm",
        **fused("self_attn.kv_b_proj", "attention.key_up", "attention.value_up", groups=heads),
        **EXPERTS,
        "feed_forward.shared_expert.gate": "mlp.shared_experts.gate_proj",
        "feed_forward.shared_expert.up": "mlp.shared_experts.up_proj",
        "feed_forward.shared_expert.down": "mlp.shared_experts.down_proj",
        "attention.indexer.query": "self_attn.indexer.wq_b",
        "attention.indexer.key": "self_attn.indexer.wk",
        "attention.indexer.key_norm": "self_attn.indexer.k_norm",
        "attention.indexer.weights": "self_attn.indexer.weights_proj",
    }
    balance = "feed_forward.router.balance"
    return {
        **names(parts),
        f"decoder.layers.{{layer}}.{balance}": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
    }


def _attention(config: Config, size: Sizes) -> LatentAttention:
    head_dim, rotary_dim = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    # the heads' sizes follow from the parts', and heads of keys and values mean nothing with a latent
    config.discard("head_dim", "qk_head_dim", "num_key_value_heads")
    config.put("rope_interleaved", config.take("rope_interleave", bool, True))
    position = rotary(config, rotary_dim, size.context)
    scale, yarn = (head_dim + rotary_dim) ** -0.5, position.scaling
    if isinstance(yarn, Yarn) and yarn.mscale_all_dim:  # so that what does not rotate is scaled too
        warmth = mscale(yarn.factor, yarn.mscale_all_dim)
        scale = scale * warmth * warmth
        if not math.isfinite(scale):
            raise ConfigError(
                f"{config.where}: mscale_all_dim {yarn.mscale_all_dim:g} gives no finite scale."
            )
    return LatentAttention(
        config.size("num_attention_heads"),
        head_dim,
        rotary_dim,
        config.size("v_head_dim"),
        config.size("kv_lora_rank"),
        config.optional("q_lora_rank"),
        Score(scale),
        position,
        norm=RMSNorm(1e-6),  # not rms_norm_eps
        bias="ao" if config.take("attention_bias", bool, False) else "",
    )


def routed_experts(config: Config, dense: Gated) -> Experts:
    score = config.choice("scoring_func", SCORES, "sigmoid")
    best, normalise = (
        config.choice("topk_method", CHOICES, "noaux_tc"),
        config.take("norm_topk_prob", bool, True),
    )
    if score == "softmax" and normalise:
        raise ConfigError(
            f"{config.at('norm_topk_prob')} is {shown(True)} with a softmax over the experts, "
            "where released code does not agree what follows; only False is known."
        )
    groups, top_groups = config.size("n_group", 1), config.size("topk_group", 1)
    if config.size("n_routed_experts") % groups or top_groups > groups:
        raise ConfigError(
            f"{config.at('n_group')} {groups:,} and topk_group {top_groups:,} do not fit together."
        )
    grouped = best is not None and groups > 1
    router = Router(
        score,
        normalise,
        config.positive("routed_scaling_factor", 1.0),
        balance=best == 2,
        groups=groups if grouped else 1,
        top_groups=top_groups if grouped else 1,
        group_best=best if best is not None and grouped else 2,
    )
    hidden, shared = config.size("moe_intermediate_size"), config.optional("n_shared_experts")
    return experts(
        config,
        "n_routed_experts",
        Gated(dense.activation, hidden),
        router,
        None if shared is None else replace(dense, hidden=shared * hidden),
    )


def _guessing_ahead(config: Config, depth: int) -> tuple[str, ...]:
    """The further layers that guess ahead (MTP) stand behind the others in the files."""
    further = config.take("num_nextn_predict_layers", int, config.take("num_mtp_layers", int, 0))
    return tuple(f"model.layers.{depth + i}.*" for i in range(min(further, MOST_LAYERS)))


V3 = {
    "max_position_embeddings": 4096,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
}
V2 = {
    **V3,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": None,
    "n_group": None,
    "topk_group": None,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "norm_topk_prob": False,
}
V32 = {**V3, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}
GLM = {
    **V32,
    "max_position_embeddings": 202_752,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "q_lora_rank": 2048,
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
    "index_n_heads": 32,
    "indexer_rope_interleave": True,
}
INDEXED = frozenset(
    {
        *("index_topk", "index_head_dim", "index_n_heads", "indexer_rope_interleave", "indexer_types"),
        *("index_topk_freq", "index_topk_pattern", "index_skip_topk_offset"),
        "index_share_for_mtp_iteration",
    }
)
FAMILY = Family(
    types=("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa"),
    describe=describe,
    defaults={"deepseek_v2": V2, "deepseek_v3": V3, "deepseek_v32": V32, "kimi_k2": V3, "glm_moe_dsa": GLM},
    own={"deepseek_v32": INDEXED, "glm_moe_dsa": INDEXED},
)
