"""NVIDIA's Nemotron-H and Nemotron 3: mostly states of fixed size, a few layers of attention, no positions.

NVIDIA 2025. A layer is one branch: a state space, attention, a feed-forward or experts, which may
read and write fewer dimensions than the stream has (LatentMoE). A step of a state is as long as it
was learned to be: transformers bounds it below by `time_step_min`, which training began with, where
the files' `time_step_limit` and the authors' code have no bound.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qkv.errors import ConfigError
from qkv.families.config import Config, shown
from qkv.families.decoder_parts import (
    MOST_LAYERS,
    activation_of,
    assembled,
    context_of,
    expected,
    head_sizes,
    renamed,
)
from qkv.families.family import Description, Family
from qkv.families.weights import KINDS, Place, Table, fused, layer_names
from qkv.spec import (
    Attention,
    Dense,
    Experts,
    Language,
    Projections,
    RMSNorm,
    Router,
    Stack,
    StateSpace,
    Tokens,
    pre_norm,
)
from qkv.spec.layers import Mixer

PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
KINDS_OF_LAYER = {
    **{name: name for name in PATTERN.values()},
    "linear_attention": "mamba",
    "full_attention": "attention",
}
LARGEST_STEP = 3.5e38
OLDER_NAMES = {"attention_head_dim": "head_dim", "rms_norm_eps": "layer_norm_epsilon"}


def describe(config: Config) -> Description:
    """From a configuration of model type nemotron_h."""
    renamed(config, OLDER_NAMES)
    width, vocab, context = config.size("hidden_size"), config.size("vocab_size"), context_of(config, 4096)
    norm = RMSNorm(config.positive("layer_norm_epsilon", 1e-5))
    expected(config, use_bias=False, mamba_proj_bias=False, attention_bias=False)
    kinds = _kinds(config)
    # of kernels, of precision and of how weights were drawn; and a rotation that no layer has
    config.discard("expand", "chunk_size", "num_logits_to_keep", "use_mamba_kernels", "mamba_ssm_cache_dtype")
    config.discard("residual_in_fp32", "rescale_prenorm_residual", "moe_shared_expert_overlap", "norm_eps")
    config.discard("time_step_floor", "time_step_max", "time_step_min", "time_step_rank")
    config.discard("rope_theta", "partial_rotary_factor", "rope_parameters")
    # of the layers that guess ahead, which stand apart
    config.discard("num_nextn_predict_layers", "mtp_hybrid_override_pattern", "mtp_layers_block_type")
    heads, kv_heads, head_dim = head_sizes(config, width)
    space, dense = _space(config, norm), _dense(config)
    mixers: dict[str, Mixer] = {
        "mamba": space,
        "attention": Attention(heads, kv_heads, head_dim, projections=Projections()),
        "mlp": dense,
    }
    routed = _experts(config, dense)
    if routed is not None:
        mixers["moe"] = routed
    if not mixers.keys() >= set(kinds):
        raise ConfigError(f"{config.at('n_routed_experts')} is missing, and some layers have experts.")
    layers = tuple(pre_norm(mixers[kind], norm=norm) for kind in kinds)
    found = assembled(config, Stack(Tokens(vocab, width), layers, norm), Language(vocab), context)
    return found.named(_names(space), "backbone.", ("mtp.*",))


def _kinds(config: Config) -> list[str]:
    """What each layer is: a letter in older files, a word in newer ones, which need no other depth."""
    pattern = config.take("hybrid_override_pattern", str, None)
    words = "layers_block_type" in config or "layer_types" in config
    if pattern is not None and not words:
        unknown = sorted(set(pattern) - PATTERN.keys())
        if unknown:
            raise ConfigError(
                f"{config.at('hybrid_override_pattern')} holds {shown(unknown[0])}, which is not known "
                f"({', '.join(PATTERN)})."
            )
        config.put("layers_block_type", [PATTERN[letter] for letter in pattern])
    renamed(config, {"layer_types": "layers_block_type"})
    listed = config.peek("layers_block_type")
    depth = config.size("num_hidden_layers", len(listed) if listed else None, most=MOST_LAYERS)
    kinds = config.each("layers_block_type", KINDS_OF_LAYER, depth or 0, "layers")
    if not kinds:
        raise ConfigError(f"{config.at('layers_block_type')} is missing: it says what each layer is.")
    return kinds


def _space(config: Config, norm: RMSNorm) -> StateSpace:
    heads, groups = config.size("mamba_num_heads", 128), config.size("n_groups", 8)
    if heads % groups:
        raise ConfigError(f"{config.at('mamba_num_heads')} {heads:,} is no multiple of n_groups {groups:,}.")
    limit = config.take("time_step_limit", list, None)
    if limit is not None and not _boundless(limit):
        raise ConfigError(
            f"{config.at('time_step_limit')} is {shown(limit)}; only steps without a bound are known. "
            'Pass ignore=("time_step_limit",) to load without it.'
        )
    return StateSpace(
        heads,
        config.size("mamba_head_dim", 64),
        config.size("ssm_state_size", 128),
        groups,
        config.size("conv_kernel", 4),
        config.take("use_conv_bias", bool, True),
        norm,
        activation_of(config, "mamba_hidden_act", "silu"),
    )


def _boundless(limit: list[Any]) -> bool:
    """From 0 to infinity, in one of its spellings, or to a number that no fp32 reaches."""
    if len(limit) != 2 or limit[0] != 0:
        return False
    most = limit[1].get("__float__") if isinstance(limit[1], dict) else limit[1]
    return most == "Infinity" or (isinstance(most, int | float) and most > LARGEST_STEP)


def _dense(config: Config) -> Dense:
    activation = activation_of(config, "mlp_hidden_act", "relu2")
    return Dense(activation, config.size("intermediate_size", 21_504), config.take("mlp_bias", bool, False))


def _experts(config: Config, dense: Dense) -> Experts | None:
    count = config.size("n_routed_experts", None)
    if count is None:
        return None
    groups, top_groups = config.size("n_group", 1), config.size("topk_group", 1)
    if count % groups or top_groups > groups:
        raise ConfigError(
            f"{config.at('n_group')} {groups:,} and topk_group {top_groups:,} do not fit together."
        )
    router = Router(
        "sigmoid",
        config.take("norm_topk_prob", bool, True),
        config.positive("routed_scaling_factor", 1.0),
        balance=True,
        groups=groups,
        top_groups=top_groups,
    )
    expected(config, n_shared_experts=1)
    latent = config.size("moe_latent_size", None)
    if latent is not None and dense.bias:
        raise ConfigError(f"{config.at('mlp_bias')} is true; experts with a latent are known without biases.")
    return Experts(
        count,
        config.size("num_experts_per_tok", 2, most=count),
        replace(dense, hidden=config.size("moe_intermediate_size", 7688), bias=False),
        router,
        replace(dense, hidden=config.size("moe_shared_expert_intermediate_size", 7688)),
        latent=latent,
    )


def _names(space: StateSpace) -> Table:
    values = space.heads * space.head_dim
    convolved = (space.channels, 1, space.convolution)
    parts: dict[str, str | Place] = {
        "mixer_before": "norm",
        "attention_before": "norm",
        "feed_forward_before": "norm",
        "attention.query": "mixer.q_proj",
        "attention.key": "mixer.k_proj",
        "attention.value": "mixer.v_proj",
        "attention.output": "mixer.o_proj",
        **fused("mixer.in_proj", *(f"mixer.{part}" for part in ("gate", "value", "key", "query", "decay"))),
        "mixer.convolution": Place("mixer.conv1d", shape=convolved),
        "mixer.norm": Place("mixer.norm", shape=(values,)),
        "mixer.output": "mixer.out_proj",
        "feed_forward.up": "mixer.up_proj",
        "feed_forward.down": "mixer.down_proj",
        "feed_forward.router": "mixer.gate",
        "feed_forward.expert.up": "mixer.experts.{expert}.up_proj",
        "feed_forward.expert.down": "mixer.experts.{expert}.down_proj",
        "feed_forward.shared_expert.up": "mixer.shared_experts.up_proj",
        "feed_forward.shared_expert.down": "mixer.shared_experts.down_proj",
        "feed_forward.latent_down": "mixer.fc1_latent_proj",
        "feed_forward.latent_up": "mixer.fc2_latent_proj",
    }
    layer, theirs = "decoder.layers.{layer}", "backbone.layers.{layer}.mixer"
    return {
        "decoder.embedding.weight": "backbone.embeddings.weight",
        **layer_names("backbone.layers.{layer}", parts),
        f"{layer}.feed_forward.router.balance": f"{theirs}.gate.e_score_correction_bias",
        f"{layer}.mixer.decay_bias": f"{theirs}.dt_bias",
        f"{layer}.mixer.decay_log": f"{theirs}.A_log",
        f"{layer}.mixer.skip": f"{theirs}.D",
        **{f"decoder.norm.{kind}": f"backbone.norm_f.{kind}" for kind in KINDS},
        "head.weight": "lm_head.weight",
    }


FAMILY = Family(types=("nemotron_h",), describe=describe)
