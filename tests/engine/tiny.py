"""Small random models with a real byte-level tokenizer, with and without files; ways to make one speak."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from qkv.checkpoints import StoredTensor
from qkv.families import Description
from qkv.loading import Files, Loaded
from qkv.model import Model
from qkv.runtime.choice import choose
from qkv.spec import Gated, Language, Model as Spec, RMSNorm, Rotary, Stack, Tokens, pre_norm
from qkv.spec.attention import Attention
from qkv.text import Tokenizer, from_gguf
from qkv.text.pieces import BYTE_ALPHABET
from tests.support import random_model

WORDS = ("AB", "ABC", "DE", "DEF", "GH", "GHI", "hello")
END, START, CLOSE = range(256 + len(WORDS), 256 + len(WORDS) + 3)
VOCAB = CLOSE + 1
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_metadata() -> dict[str, object]:
    """256 bytes, a few words and three control tokens; END ends a text, and CLOSE a turn of the chat."""
    tokens = [*BYTE_ALPHABET, *WORDS, "<|end|>", "<|im_start|>", "<|im_end|>"]
    merges = ["A B", "AB C", "D E", "DE F", "G H", "GH I"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * END + [3] * 3,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.chat_template": CHATML,
    }


@cache
def byte_tokenizer() -> Tokenizer:
    return from_gguf(tokenizer_metadata())


def byte(value: int) -> int:
    """The token of one byte."""
    return list(BYTE_ALPHABET.values()).index(value)


def word(text: str) -> int:
    return 256 + WORDS.index(text)


def spec(vocab: int = VOCAB) -> Spec:
    layer = pre_norm(Attention(4, 2, 6, position=Rotary(100.0)), Gated("silu", 24), norm=RMSNorm())
    return Spec(decoder=Stack(Tokens(vocab, 16), (layer, layer), RMSNorm()), head=Language(vocab))


def tiny(
    *,
    seed: int = 0,
    context: int | None = None,
    eos: Sequence[int] | None = None,
    vocab: int = VOCAB,
    generation: dict[str, object] | None = None,
    tokenizer: bool = True,
    described: Spec | None = None,
    runtime: str = "torch",
) -> Model:
    """A model whose ends are the tokenizer's and those of `eos`, as a loaded one's are."""
    texts = byte_tokenizer() if tokenizer else None
    ends = frozenset(eos or ()) | (texts.eos_ids if texts else frozenset())
    return random_files(
        described or spec(vocab),
        seed,
        context,
        runtime,
        tokenizer=texts,
        ends=ends,
        generation=generation or {},
    )


def random_files(
    described: Spec, seed: int = 0, context: int | None = None, runtime: str = "torch", **named: Any
) -> Model:
    """A model with random values, as if files held them under the description's names."""
    network = random_model(described, seed)
    return model_of(
        Description(described, {name: name for name in described.weights()}, context),
        {name: parameter.detach().numpy() for name, parameter in network.named_parameters()},
        runtime,
        **named,
    )


def model_of(
    description: Description, values: Mapping[str, np.ndarray], runtime: str = "torch", **named: Any
) -> Model:
    """A model whose files hold these values."""
    tensors = {name: StoredTensor.from_array(name, array) for name, array in values.items()}
    files = Files(Path("tiny"), description, tensors, **named)
    return Model(Loaded(files, choose(runtime, description.model)))


def says(*rows: Sequence[int]) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """A tap that makes the model say these tokens, one a pass after a prompt of one pass.

    A row that has said its last is in no further pass.
    """
    passed = iter(range(max(map(len, rows))))

    def logits(value: torch.Tensor) -> torch.Tensor:
        at = next(passed)
        chosen = torch.zeros_like(value)
        live = [tokens for tokens in rows if at < len(tokens)]
        assert len(value) == len(live)
        for row, tokens in enumerate(live):
            chosen[row, -1, tokens[at]] = 50.0
        return chosen

    return {"logits": logits}


def greedily(model: Model, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities without a cache: the whole text again for each token."""
    ids, logprobs = list(prompt), []
    for _ in range(count):
        shares = model(torch.tensor([ids]))[0, -1].double().log_softmax(-1)
        ids.append(int(shares.argmax()))
        logprobs.append(float(shares[ids[-1]]))
    return ids[len(prompt) :], logprobs


def save_llama(folder: Path, **changes: Any) -> LlamaForCausalLM:
    """A random Llama as transformers saves it, with the same tokenizer in a tokenizer.json."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.4,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": None,
    }
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()
    model.save_pretrained(folder)
    data = tokenizer_metadata()
    texts: list[str] = data["tokenizer.ggml.tokens"]  # type: ignore[assignment]
    merges = [tuple(merge.split()) for merge in data["tokenizer.ggml.merges"]]  # type: ignore[attr-defined]
    tokenizer = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(texts[:END])}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(texts[END:])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": texts[END]}))
    (folder / "chat_template.jinja").write_text(CHATML)
    return model
