"""Gemma 4, text: layers with a window, and layers whose values are their keys; dense, or with experts beside.

Google DeepMind 2026. The towers are not described: a table for each axis, linears with bounds, rows
that see one another both ways in the text. Nor are the small models' inputs to each layer, and the
layers that read the keys and values of another.
"""

from __future__ import annotations

import math
from dataclasses import replace

from qkv.errors import ConfigError
from qkv.families.config import Config, shown
from qkv.families.decoder_parts import expected
from qkv.families.family import Description, Family
from qkv.families.gemma2 import SANDWICH, geglu
from qkv.families.gemma3 import local_rotation
from qkv.families.llama import LAYER_TYPES, QUERY_KEY_NORMS, names
from qkv.families.pairs import nested
from qkv.families.positions import MOST_POSITIONS, rotary
from qkv.families.rotary_decoders import Sizes, decoder, optional_bias, sizes
from qkv.families.weights import Place, fused
from qkv.spec import (
    Attention,
    Branch,
    Causal,
    Experts,
    Gate,
    Gated,
    Layer,
    Projections,
    Proportional,
    RMSNorm,
    Rotary,
    Router,
    Score,
    Sublayer,
    Window,
)
from qkv.spec.layers import Mixer

OURS, THEIRS = "decoder.layers.{layer}.feed_forward", "model.layers.{layer}"
PARTS: dict[str, str | Place] = {
    **SANDWICH,
    **QUERY_KEY_NORMS,
    # of layers with experts
    "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_norm_after": "post_feedforward_layernorm_1",
    "feed_forward_2.norm": "pre_feedforward_layernorm_2",
    "feed_forward_2_norm_after": "post_feedforward_layernorm_2",
    "feed_forward_2.router": "router.proj",
}
WEIGHTS = {
    **names(PARTS),
    f"{OURS}_post.weight": f"{THEIRS}.layer_scalar",
    f"{OURS}_2.router.norm.weight": f"{THEIRS}.router.scale",
    f"{OURS}_2.router.gain": f"{THEIRS}.router.per_expert_scale",
    **fused(
        f"{THEIRS}.experts.gate_up_proj",
        *(f"{OURS}_2.expert.gate.weight", f"{OURS}_2.expert.up.weight"),
        axis=1,
    ),
    f"{OURS}_2.expert.down.weight": f"{THEIRS}.experts.down_proj",
}


def describe(config: Config) -> Description:
    """From a configuration of model type gemma4 or gemma4_text."""
    if "text_config" not in config:
        return _text(config)
    text = nested(config, "text_config", TEXT)
    text.put("architectures", config.take("architectures", list, None))
    text.put("tie_word_embeddings", config.take("tie_word_embeddings", bool, True))
    config.leave(*(key for key in ("vision_config", "audio_config") if key in config))  # see above
    config.discard(*(f"{name}_token_id" for name in ("audio", "image", "video", "boa", "boi", "eoa", "eoi")))
    config.discard("eoa_token_index", "vision_soft_tokens_per_image")  # for the prompt
    config.finish()
    return _text(text).named({})  # the towers' tensors would stand beside its own


def _text(config: Config) -> Description:
    size, norm = sizes(config), RMSNorm(config.positive("rms_norm_eps", 1e-6))
    for key in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if config.take(key, int, 0):
            raise ConfigError(
                f"{config.at(key)} is {shown(config.peek(key))}; only models where it is 0 can be described."
            )
    expected(config, use_double_wide_mlp=False)
    config.discard("vocab_size_per_layer_input")
    slides = config.each("layer_types", LAYER_TYPES, size.depth, "layers")
    slides = slides or [(i + 1) % 6 != 0 for i in range(size.depth)]
    slides = [*slides[:-1], False]  # the last sees all, whatever the file says
    _larger_heads(config, [i for i, slide in enumerate(slides) if not slide])
    local, full = _attentions(config, size, norm)
    dense = geglu(config)
    routed = _experts(config, dense, norm, size.width)
    layers = (_layer(local if slide else full, dense, routed, norm) for slide in slides)
    cap = config.positive("final_logit_softcapping", None)
    return decoder(config, size, layers, norm, scale=math.sqrt(size.width), cap=cap).named(WEIGHTS, "model.")


def _larger_heads(config: Config, full: list[int]) -> None:
    """A newer spelling names what differs for each layer that sees all; it is the same in all of them."""
    given = config.take("per_layer_config", dict, None)
    if given is None:
        return
    kinds = [entry for entry in given.values() if isinstance(entry, dict)]
    known = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    alike = bool(kinds) and all(entry == kinds[0] and entry.keys() <= known.keys() for entry in kinds)
    if set(given) != {str(i) for i in full} or len(kinds) != len(given) or not alike:
        raise ConfigError(
            f"{config.at('per_layer_config')} is {shown(given)}; only one size of heads, in all layers "
            "that see everything, can be described."
        )
    for theirs, ours in known.items():
        config.put(ours, kinds[0].get(theirs))


def _layer(mixer: Mixer, dense: Gated, routed: Experts | None, norm: RMSNorm) -> Layer:
    """Norms around each branch and around the sum; at its end the stream is multiplied by one number."""
    first = Sublayer((Branch(mixer),), before=norm, after=norm)
    if routed is None:
        return Layer((first, Sublayer((Branch(dense),), before=norm, after=norm, post=Gate())))
    both = (Branch(dense, norm, norm), Branch(routed, after=norm))
    return Layer((first, Sublayer(both, after=norm, post=Gate())))


def _attentions(config: Config, size: Sizes, norm: RMSNorm) -> tuple[Attention, Attention]:
    """That of layers with a window, and that of the others, whose heads are larger and fewer."""
    near = local_rotation(config)
    seen = config.take("use_bidirectional_attention", str, "vision")
    if seen != "vision":  # of images alone; a text is read from left to right
        raise ConfigError(
            f"{config.at('use_bidirectional_attention')} is {shown(seen)}; only 'vision' and null are known."
        )
    heads, kv_heads = config.size("num_attention_heads"), config.size("num_key_value_heads")
    head_dim, wide = config.size("head_dim"), config.size("global_head_dim", 512)
    through = Projections(optional_bias(config), norm=norm, value_norm=replace(norm, scale=False))
    window = config.size("sliding_window", most=MOST_POSITIONS)
    local = Attention(
        heads,
        kv_heads,
        head_dim,
        score=Score(1.0),
        position=rotary(near, head_dim, size.context),
        mask=Causal() & Window(window) if window < size.context else Causal(),
        projections=through,
    )
    shares, fewer = (
        config.take("attention_k_eq_v", bool, False),
        config.size("num_global_key_value_heads", kv_heads),
    )
    full = replace(
        local,
        kv_heads=fewer if shares else kv_heads,
        head_dim=wide,
        position=_proportional(config, wide, size.context),
        mask=Causal(),
        projections=replace(through, values_are_keys=shares),
    )
    for attention in (local, full):
        if heads % attention.kv_heads:
            raise ConfigError(
                f"{config.at('num_attention_heads')} {heads:,} is no multiple of "
                f"{attention.kv_heads:,} key/value heads."
            )
    return local, full


def _proportional(config: Config, head_dim: int, context: int) -> Rotary:
    """A share of the pairs turns, with the frequencies of the whole head."""
    found = config.peek("rope_parameters")
    if isinstance(found, dict) and found.get("rope_type", "proportional") != "proportional":
        return rotary(config, head_dim, context)
    given = config.inside("rope_parameters") or config.again({})
    given.discard("rope_type")
    share, factor = given.positive("partial_rotary_factor", 0.25), given.positive("factor", 1.0)
    theta = given.positive("rope_theta", 1_000_000.0)
    given.finish()
    return Rotary(theta, scaling=Proportional(share, factor))


def _experts(config: Config, dense: Gated, norm: RMSNorm, width: int) -> Experts | None:
    count, top_k = config.size("num_experts", None), config.size("top_k_experts", None)
    hidden = config.size("moe_intermediate_size", None)
    config.discard("expert_intermediate_size")  # an earlier name
    if not config.take("enable_moe_block", bool, False):
        return None
    if count is None or top_k is None or hidden is None or top_k > count:
        raise ConfigError(
            f"{config.at('num_experts')} {shown(count)}, top_k_experts {shown(top_k)} and "
            f"moe_intermediate_size {shown(hidden)} describe no experts."
        )
    router = Router(norm=norm, logit_scale=width**-0.5, gain=True)
    return Experts(count, top_k, replace(dense, hidden=hidden), router, norm=norm)


TEXT = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "tie_word_embeddings": True,
}
FAMILY = Family(types=("gemma4", "gemma4_text"), describe=describe, defaults={"gemma4_text": TEXT})
