"""Qwen 2 and 2.5, and Xiaomi's MiMo: Llama with biases on queries, keys and values. Yang et al. 2024."""

from __future__ import annotations

from dataclasses import replace

from qkv.families.config import Config
from qkv.families.decoder_parts import expected
from qkv.families.family import Description, Family
from qkv.families.llama import IRRELEVANT, WEIGHTS
from qkv.families.positions import MOST_POSITIONS
from qkv.families.rotary_decoders import attention, decoder, extended, gated, masks, sizes
from qkv.spec import RMSNorm, pre_norm


def describe(config: Config) -> Description:
    """From a configuration of model type qwen2 or mimo."""
    size, norm = sizes(config), RMSNorm(config.positive("rms_norm_eps", 1e-6))
    config.discard("attention_bias")  # the class has these three, whatever it says
    mixer = attention(config, size, "qkv")
    size = extended(config, size, mixer.position)
    window, start = switched_window(config), config.take("max_window_layers", int, 28)
    slides = [window is not None and i >= start for i in range(size.depth)]
    feed_forward = gated(config)
    expected(config, use_mrope=False)  # positions of more than one axis
    config.discard("num_nextn_predict_layers")  # further layers, for guessing ahead: MTP
    layers = (
        pre_norm(replace(mixer, mask=mask), feed_forward, norm=norm)
        for mask in masks(config, window, size.context, slides)
    )
    found = decoder(config, size, layers, norm, irrelevant=("model.mtp_layers.*",))
    return found.named(WEIGHTS, "model.", IRRELEVANT)


def switched_window(config: Config) -> int | None:
    """Qwen's windows: none unless `use_sliding_window` says so."""
    if not config.take("use_sliding_window", bool, False):
        config.discard("sliding_window")
        return None
    window: int | None = config.size("sliding_window", None, most=MOST_POSITIONS)
    return window


DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096}
FAMILY = Family(types=("qwen2", "mimo"), describe=describe, defaults={"qwen2": DEFAULTS, "mimo": DEFAULTS})
