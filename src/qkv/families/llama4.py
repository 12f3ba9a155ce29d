"""Llama 4, text: three layers rotate and see their chunk, the fourth sees all and does not rotate.

Meta 2025. The vision tower is not described: its rotation has a share of the frequencies for each
axis and leaves the class token, which stands last, unturned.
"""

from __future__ import annotations

from dataclasses import replace

from qkv.errors import ConfigError
from qkv.families.config import Config
from qkv.families.family import Description, Family
from qkv.families.llama import names
from qkv.families.pairs import nested
from qkv.families.positions import MOST_POSITIONS
from qkv.families.rotary_decoders import (
    Sizes,
    attention,
    decoder,
    experts,
    extended,
    gated,
    optional_bias,
    sizes,
)
from qkv.families.weights import Place, fused
from qkv.spec import (
    Attention,
    Causal,
    Chunk,
    Experts,
    Gated,
    LogScale,
    Projections,
    RMSNorm,
    Router,
    Score,
    pre_norm,
)

LAYER_TYPES = {"chunked_attention": True, "full_attention": False}

OURS, EXPERTS = "decoder.layers.{layer}.feed_forward", "model.layers.{layer}.feed_forward.experts"
PARTS = {
    "feed_forward.gate": "feed_forward.gate_proj",
    "feed_forward.up": "feed_forward.up_proj",
    "feed_forward.down": "feed_forward.down_proj",
    "feed_forward.router": "feed_forward.router",
    "feed_forward.shared_expert.gate": "feed_forward.shared_expert.gate_proj",
    "feed_forward.shared_expert.up": "feed_forward.shared_expert.up_proj",
    "feed_forward.shared_expert.down": "feed_forward.shared_expert.down_proj",
}
WEIGHTS = {  # all experts in one tensor, (expert, in, out)
    **names(PARTS),
    **fused(
        f"{EXPERTS}.gate_up_proj",
        *(f"{OURS}.expert.gate.weight", f"{OURS}.expert.up.weight"),
        axis=1,
        transposed=True,
    ),
    f"{OURS}.expert.down.weight": Place(f"{EXPERTS}.down_proj", transposed=True),
}


def describe(config: Config) -> Description:
    """From a configuration of model type llama4 or llama4_text."""
    if "text_config" not in config and "vision_config" not in config:
        return _text(config)
    text = nested(config, "text_config", TEXT)
    text.put("architectures", config.take("architectures", list, None))
    config.discard("boi_token_index", "eoi_token_index", "boi_token_id", "eoi_token_id")  # for the prompt
    config.discard("image_token_index", "image_token_id")
    config.leave("vision_config")  # see above
    config.discard("tie_word_embeddings")  # the text's own decides
    config.finish()
    return _text(text).named({})  # the vision tower's tensors would stand beside its own


def _text(config: Config) -> Description:
    size, eps = sizes(config), config.positive("rms_norm_eps", 1e-5)
    config.put("rope_interleaved", True)
    turning = attention(config, size)
    size = extended(config, size, turning.position)
    mixers = _attentions(config, size, turning, eps)
    norm = RMSNorm(eps)
    layers = (
        pre_norm(mixer, feed_forward, norm=norm)
        for mixer, feed_forward in zip(mixers, _feed_forwards(config, size.depth), strict=True)
    )
    config.discard("for_llm_compressor")  # a tool's note
    return decoder(config, size, layers, norm).named(WEIGHTS, "model.")


def _attentions(config: Config, size: Sizes, turning: Attention, eps: float) -> list[Attention]:
    """`no_rope_layers` holds 1 where a layer rotates (sic)."""
    bias, normal = optional_bias(config), config.take("use_qk_norm", bool, True)
    norm = RMSNorm(eps, scale=False) if normal else None
    turning = replace(turning, projections=Projections(bias, norm=norm, norm_after_rotation=normal))
    floor, factor = (
        config.size("floor_scale", 8192, most=MOST_POSITIONS),
        config.take("attn_scale", float, 0.1),
    )
    # early files have a number here
    tuned = bool(config.take("attn_temperature_tuning", (bool, int), True))
    score = Score(query_scale=LogScale(floor, factor) if tuned else None)
    still = replace(turning, position=None, score=score, projections=Projections(bias))

    every = config.size("no_rope_layer_interval", 4)
    listed = config.take("no_rope_layers", list, None) or None  # an empty list is none
    turns = config.each("no_rope_layers", {1: True, 0: False}, size.depth, "layers") if listed else None
    turns = turns or [(i + 1) % every != 0 for i in range(size.depth)]

    chunk = config.size("attention_chunk_size", None, most=MOST_POSITIONS)
    chunked = config.each("layer_types", LAYER_TYPES, size.depth, "layers") or [
        turn and chunk is not None for turn in turns
    ]
    if chunk is None and any(chunked):
        raise ConfigError(f"{config.at('attention_chunk_size')} is missing, and layer_types calls for one.")
    own = Causal() & Chunk(chunk) if chunk is not None and chunk < size.context else Causal()
    return [
        replace(turning if turn else still, mask=own if local else Causal())
        for turn, local in zip(turns, chunked, strict=True)
    ]


def _feed_forwards(config: Config, depth: int) -> list[Gated | Experts]:
    """Experts in every n-th layer, or in those that `moe_layers` lists."""
    expert = gated(config)
    dense = replace(expert, hidden=config.size("intermediate_size_mlp"))
    router = Router("sigmoid", normalise=False, scales="input")
    routed = experts(config, "num_local_experts", expert, router, expert)
    every = config.size("interleave_moe_layer_step", 1)
    listed = config.take("moe_layers", list, None)
    places = range(every - 1, depth, every) if listed is None else listed
    return [routed if i in places else dense for i in range(depth)]


TEXT = {
    "vocab_size": 202_048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "attention_chunk_size": 8192,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
}
FAMILY = Family(types=("llama4", "llama4_text"), describe=describe, defaults={"llama4_text": TEXT})
