"""Kimi K2.5: Kimi K2 over text and images. Moonshot AI 2026.

The vision tower is not described: its positions are a table of two axes read between its rows, and
sinusoids of time, and its frames are averaged before they are projected.
"""

from __future__ import annotations

from qkv.families.config import Config
from qkv.families.deepseek import V3, describe as describe_text
from qkv.families.family import Description, Family
from qkv.families.pairs import nested


def describe(config: Config) -> Description:
    """From a configuration of model type kimi_k25."""
    text = nested(config, "text_config", V3)
    text.discard("quantization_config")  # repeated there
    config.discard("media_placeholder_token_id", "ignore_index", "use_unified_vision_chunk")  # for the prompt
    config.discard("video_placeholder", "image_token_id", "tie_word_embeddings")  # the text's own decides
    config.leave("vision_config")  # see above
    config.discard("architectures")
    config.finish()
    return describe_text(text).named({})  # the vision tower's tensors would stand beside its own


FAMILY = Family(types=("kimi_k25",), describe=describe)
