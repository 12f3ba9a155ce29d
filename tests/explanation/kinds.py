"""Small random models of each kind that is explained, as transformers saves them, with words as tokens."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors

import qkv
from qkv.model import Model

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (
    *(*SPECIAL, ".", ",", "the", "cat", "dog", "sat", "ran", "on", "under", "a", "mat", "tree", "and", "it"),
    *("was", "red", "green", "big"),
)
CLS, SEP, MASK, STOP = (WORDS.index(text) for text in ("[CLS]", "[SEP]", "[MASK]", "."))
SIZE: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
BART: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": CLS,
    "eos_token_id": SEP,
    "decoder_start_token_id": SEP,
    "forced_eos_token_id": None,
}
MADE: dict[str, Any] = {
    "masked": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZE)),
    "class": lambda: transformers.BertForSequenceClassification(
        transformers.BertConfig(**SIZE, num_labels=3)
    ),
    "embedding": lambda: transformers.BertModel(transformers.BertConfig(**SIZE)),
    "pair": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**BART)),
}


@functools.cache
def folder(kind: str) -> Path:
    """A folder in Hugging Face layout, made once."""
    path = Path(tempfile.mkdtemp(prefix=f"{kind}-"))
    torch.manual_seed(3)
    network = MADE[kind]().eval()
    with torch.no_grad():  # larger than a new model's, so that every part matters
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.25)
    network.save_pretrained(path)
    tokenizer = tokenizers.Tokenizer(models.WordLevel({text: i for i, text in enumerate(WORDS)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"mask_token": "[MASK]"}))
    if kind == "embedding":
        steps = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
        kinds = [{"path": at, "type": f"sentence_transformers.models.{name}"} for at, name in steps]
        (path / "modules.json").write_text(json.dumps([{"idx": i, **each} for i, each in enumerate(kinds)]))
        (path / "1_Pooling").mkdir()
        pooling = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True}
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


@functools.cache
def model(kind: str) -> Model:
    return qkv.load(folder(kind), runtime="torch")
