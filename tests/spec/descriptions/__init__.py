"""Published Transformers described by hand: composed of parts of `qkv.spec` and of nothing else.

One function an architecture; called without arguments it gives the published model (or, where
none is small enough to name, what transformers takes as default), with sizes a small one.
"""

from __future__ import annotations

from collections.abc import Callable

from qkv.spec import Model
from tests.spec.descriptions.decoders import (
    bloom,
    cohere,
    falcon,
    gemma2,
    gemma3,
    gpt2,
    gpt_j,
    gpt_neox,
    granite,
    llama,
    mixtral,
    mpt,
    olmo2,
    opt,
    opt_350m,
    phi3,
    qwen2,
    qwen3,
    transformer_xl,
)
from tests.spec.descriptions.encoders import (
    albert,
    bart,
    bert,
    bert_mlm,
    clip_text,
    clip_vision,
    deberta,
    deberta_v3,
    electra,
    gemma3_vision,
    llama2,
    llava,
    modernbert,
    siglip_vision,
    t5,
    vit,
    whisper,
)
from tests.spec.descriptions.hybrids import (
    deepseek_v3,
    gpt_oss,
    llama4,
    nemotron_h,
    qwen3_next,
)

__all__ = ["ALL", "gemma3_vision"]

ALL: dict[str, Callable[[], Model]] = {
    f.__name__: f  # type: ignore[misc]
    for f in (
        gpt2, opt, opt_350m, bloom, mpt, transformer_xl, llama, llama2, mixtral, qwen2, qwen3, phi3, granite,
        olmo2, gemma2, gemma3, gpt_j, gpt_neox, cohere, falcon, deepseek_v3, gpt_oss, llama4, qwen3_next,
        nemotron_h,
        bert, bert_mlm, albert, electra, deberta, deberta_v3, modernbert, t5, bart, whisper, vit,
        siglip_vision, clip_vision, clip_text, llava,
    )
}  # fmt: skip
