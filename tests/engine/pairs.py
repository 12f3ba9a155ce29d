"""A random BART as transformers makes it, and the same model here."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
from transformers import BartConfig, BartForConditionalGeneration

from qkv.families import describe
from qkv.model import Model
from tests.engine.tiny import model_of

VOCAB, ROWS, START, FIRST, END = 60, 40, 2, 0, 2


def bart(
    seed: int = 0, runtime: str = "torch", **generation: Any
) -> tuple[Model, BartForConditionalGeneration]:
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
    description = describe({**data, "architectures": ["BartForConditionalGeneration"]})
    values = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    named = {"ends": frozenset([END]), "config": {"decoder_start_token_id": START}, "generation": generation}
    return model_of(replace(description, context=ROWS), values, runtime, **named), theirs
