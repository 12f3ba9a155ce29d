"""A random BART as transformers makes it, and the same model here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import BartConfig, BartForConditionalGeneration

from qkv.families import Description, describe
from qkv.loading import Loaded
from qkv.model import Model
from qkv.nn import Transformer

VOCAB, ROWS, START, FIRST, END = 60, 40, 2, 0, 2
RENAMED = {
    "model.": "", "self_attn_layer_norm": "attention_post", "encoder_attn_layer_norm": "cross_post",
    "final_layer_norm": "feed_forward_post", "self_attn": "attention", "encoder_attn": "cross",
    "q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "output",
    "fc1": "feed_forward.up", "fc2": "feed_forward.down", "layernorm_embedding": "embedding.norm",
    "embed_positions": "embedding.position", "embed_tokens": "embedding", "lm_head": "head",
}  # fmt: skip


def bart(seed: int = 0, **generation: Any) -> tuple[Model, BartForConditionalGeneration]:
    config = BartConfig(
        vocab_size=VOCAB,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=20,
        decoder_ffn_dim=20,
        max_position_embeddings=ROWS,
        init_std=0.5,
        pad_token_id=1,
        bos_token_id=FIRST,
        eos_token_id=END,
        decoder_start_token_id=START,
        forced_eos_token_id=None,
    )
    torch.manual_seed(seed)
    theirs = BartForConditionalGeneration(config).eval()
    with torch.no_grad():  # biases and norms are made zero and one, which would hide a mistake
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    data = json.loads(config.to_json_string(use_diff=False))
    described = describe({**data, "architectures": ["BartForConditionalGeneration"]}).model
    network = Transformer(described)
    state = {}
    for name, tensor in theirs.state_dict().items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        state[name] = tensor
    network.load_state_dict({name: state[name] for name in described.weights()}, strict=False)
    loaded = Loaded(
        model=network.requires_grad_(False).eval(),
        tokenizer=None,
        context=ROWS,
        eos_ids=frozenset([END]),
        source=Path("bart"),
        description=Description(described, {}, ROWS),
        config={"decoder_start_token_id": START},
        generation=generation,
    )
    return Model(loaded), theirs
