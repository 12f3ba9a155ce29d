"""Whisper: convolutions over a spectrogram, then an encoder and a decoder. Radford et al. 2022."""

from __future__ import annotations

from qkv.families.config import Config
from qkv.families.encoders import (
    ACTIVATIONS,
    MOST_LAYERS,
    MOST_POSITIONS,
    discard_training,
    head_size,
    tied,
)
from qkv.families.family import Description, Family
from qkv.families.heads import head_among
from qkv.families.weights import KINDS, Place, Table, layer_names
from qkv.spec import (
    Attention,
    Causal,
    CrossAttention,
    Dense,
    Everything,
    Frames,
    Language,
    LayerNorm,
    Learned,
    Model,
    Projections,
    Stack,
    Tokens,
    pre_norm,
)

THROUGH = Projections(bias="qvo")  # a bias on keys would change no weight
NORM = LayerNorm(1e-5)
UNREAD = (
    "classifier_proj_size",  # of a head that is not known here
    "forced_decoder_ids",  # of generation
    "is_multilingual",
    "lang_ids",
    "language",
    "max_initial_timestamp_index",
    "median_filter_width",  # of timestamps
    "num_hidden_layers",  # another name for encoder_layers
    "scale_embedding",  # the class reads it and never scales
    "task",
    "use_weighted_layer_sum",
)
ATTENTION = {
    "attention_before": "self_attn_layer_norm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.out_proj",
}
CROSS = {
    our.replace("attention", "cross"): their.replace("self", "encoder") for our, their in ATTENTION.items()
}
FEED_FORWARD = {
    "feed_forward_before": "final_layer_norm",
    "feed_forward.up": "fc1",
    "feed_forward.down": "fc2",
}
AUGMENTATION = ("apply_spec_augment", "mask_feature_", "mask_time_")  # in training


def describe(config: Config) -> Description:
    """From a configuration of model type whisper. The context is the decoder's, in tokens."""
    discard_training(config)
    config.discard(*UNREAD, *(key for key in config.data if key.startswith(AUGMENTATION)))
    width, context = config.size("d_model"), config.size("max_target_positions", 448, most=MOST_POSITIONS)
    activation = config.choice("activation_function", ACTIVATIONS, "gelu")
    # sinusoids when trained, stored as a table
    seconds = Learned(config.size("max_source_positions", 1500, most=MOST_POSITIONS))
    frames = Frames(config.size("num_mel_bins", 80), width, position=seconds)
    tokens = Tokens(config.size("vocab_size"), width, position=Learned(context), shared=tied(config))
    heads, depth, feed_forward = _side(config, "encoder", activation)
    sizes = (heads, heads, head_size(config, width, heads))
    around = Attention(*sizes, mask=Everything(), projections=THROUGH)
    encoder = Stack(frames, (pre_norm(around, feed_forward, norm=NORM),) * depth, NORM)
    heads, depth, feed_forward = _side(config, "decoder", activation)
    sizes = (heads, heads, head_size(config, width, heads))
    before = Attention(*sizes, mask=Causal(), projections=THROUGH)
    cross = CrossAttention(*sizes, source_width=width, projections=THROUGH)
    decoder = Stack(tokens, (pre_norm(before, cross, feed_forward, norm=NORM),) * depth, NORM)
    language = Language(tokens.vocab, shared=tokens.shared)
    heads_known = {"Model": None, "ForConditionalGeneration": language}
    head = head_among(config, heads_known, "ForConditionalGeneration")
    config.finish()
    return Description(Model(encoder, decoder, head), {}, context).named(_names(frames), "model.")


def _names(frames: Frames) -> Table:
    found: dict[str, str | Place] = {
        "decoder.embedding.weight": "model.decoder.embed_tokens.weight",
        "head.weight": "proj_out.weight",
    }
    for stack, parts in (("encoder", ATTENTION), ("decoder", ATTENTION | CROSS)):
        found |= layer_names(f"model.{stack}.layers.{{layer}}", parts | FEED_FORWARD, stack)
        found[f"{stack}.embedding.position.weight"] = f"model.{stack}.embed_positions.weight"
        found |= {f"{stack}.norm.{kind}": f"model.{stack}.layer_norm.{kind}" for kind in KINDS}
    for i, into in enumerate((frames.channels, frames.width)):
        ours, theirs = f"encoder.embedding.convolution.{i}", f"model.encoder.conv{i + 1}"
        found[f"{ours}.weight"] = Place(f"{theirs}.weight", shape=(frames.width, into, frames.kernel))
        found[f"{ours}.bias"] = f"{theirs}.bias"
    return found


def _side(config: Config, name: str, activation: str) -> tuple[int, int, Dense]:
    """Heads, layers and feed-forward of one of the two stacks."""
    return (
        config.size(f"{name}_attention_heads"),
        config.size(f"{name}_layers", most=MOST_LAYERS),
        Dense(activation, config.size(f"{name}_ffn_dim")),
    )


FAMILY = Family(types=("whisper",), describe=describe)
