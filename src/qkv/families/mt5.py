"""mT5: T5 1.1 for a hundred languages; its logits are never scaled. Xue et al. 2020."""

from __future__ import annotations

from qkv.families.config import Config
from qkv.families.encoders import tied
from qkv.families.family import Description, Family
from qkv.families.t5 import described
from qkv.spec import Language


def describe(config: Config) -> Description:
    """From a configuration of model type mt5."""
    language = Language(config.size("vocab_size"), shared=tied(config))
    return described(config, language)


FAMILY = Family(types=("mt5",), describe=describe, defaults={"mt5": {"feed_forward_proj": "gated-gelu"}})
