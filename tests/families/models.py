"""Small random models as transformers saves them, for tests that read files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def oracle(kind: str = "llama", **changes: Any) -> transformers.PreTrainedModel:
    """A model of transformers whose every parameter counts: no bias is zero, no norm one."""
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **changes})
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def saved(
    folder: Path, kind: str = "llama", dtype: torch.dtype = torch.float32, shard: str = "1GB", **changes: Any
) -> transformers.PreTrainedModel:
    """The same, saved in a folder."""
    model = oracle(kind, **changes).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def tokens(batch: int = 2, length: int = 17, vocab: int = 61) -> torch.Tensor:
    return torch.randint(3, vocab, (batch, length), generator=torch.Generator().manual_seed(7))
