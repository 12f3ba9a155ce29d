"""GGUF files: their metadata as the configuration that a family reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from qkv.errors import ConfigError
from qkv.families.architectures import ARCHITECTURES, KEYS, Architecture
from qkv.families.config import Config, Record, shown
from qkv.spec.rotary import mscale

# read as part of the configuration
IRRELEVANT = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# about the file, the tokenizer, or how it was made
OUTSIDE = ("general.", "tokenizer.", "split.", "quantize.", "GGUF.", "imatrix.", "mradermacher.")
# values with which a key says nothing
NEUTRAL = {
    "attention.causal": True,
    "attention.sliding_window": 0,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.attn_factor": 1.0,
}


def architecture(metadata: Mapping[str, Any], where: str) -> str:
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ConfigError(f"{where}: general.architecture is missing.")
    return name


def known(kind: str) -> Architecture:
    """What is known of an architecture; of others, that a model type may be called the same."""
    return ARCHITECTURES.get(kind) or Architecture(family=kind)


def names(kind: str) -> dict[str, str]:
    """The file's names of keys, and those of a config.json."""
    return {f"{kind}.{theirs}": ours for theirs, ours in {**KEYS, **known(kind).keys}.items()}


def configuration(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Any],
    where: str,
    ignore: Iterable[str] = (),
    record: Record | None = None,
) -> Config:
    """The file's metadata under the names that families take.

    What the metadata leaves to the tensors is read from them: a vocabulary without a size, biases,
    an output matrix of its own, a divisor for each rotary pair. `tensors` are StoredTensor by name.
    """
    kind = architecture(metadata, where)
    told, called_by_file = known(kind), names(kind)
    prefix = f"{kind}."
    data = {
        called_by_file.get(key, key if "." in key else f"{key} (outside {prefix})"): _plain(value)
        for key, value in metadata.items()
        if not key.startswith(OUTSIDE) and not _says_nothing(key.removeprefix(prefix), value)
    }
    called = {ours: theirs for theirs, ours in called_by_file.items()}
    called |= {
        "rope_scaling": f"{prefix}rope.scaling",
        "rotary_dim": f"{prefix}rope.dimension_count",
        "divisors": "rope_freqs.weight",
        "long_factor": "rope_factors_long.weight",
        "short_factor": "rope_factors_short.weight",
    }
    data |= {"model_type": told.family}
    config = Config(data, where, ignore, called, record)
    for key, value in told.unsaid.items():
        if called.get(key) not in metadata:
            config.put(key, value)
    if told.interleaved:
        config.put("rope_interleaved", True)
    if told.complete is not None:
        told.complete(config)
    _read_rotation(config, tensors, prefix)
    _read_tensors(config, tensors, told)
    return config


def _plain(value: Any) -> Any:
    """A float as it was meant: files hold 1e-5 as the float32 next to it."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _says_nothing(key: str, value: Any) -> bool:
    return key in NEUTRAL and isinstance(value, int | float) and value == NEUTRAL[key]


def _read_tensors(config: Config, tensors: Mapping[str, Any], told: Architecture) -> None:
    embedding = tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape and "vocab_size" not in config:
        config.put("vocab_size", embedding.shape[0])
    config.put("tie_word_embeddings", "output.weight" not in tensors)
    for key, tensor in told.biases.items():
        config.put(key, tensor in tensors)


def _read_rotation(config: Config, tensors: Mapping[str, Any], prefix: str) -> None:
    """Rotated dimensions and scaling, under the names of a config.json."""
    dims = config.take(f"{prefix}rope.dimension_count", int, None)
    if dims is not None:
        config.put("rotary_dim", dims)
    width, heads = config.size("hidden_size"), config.size("num_attention_heads")
    head_dim = config.size("head_dim", width // heads)
    value_dim = config.take(f"{prefix}attention.value_length", int, head_dim)
    if value_dim != head_dim:
        raise ConfigError(
            f"{config.at(f'{prefix}attention.value_length')} is {value_dim:,} and keys have {head_dim:,}; "
            "for this kind of model both must be the same."
        )
    original = config.take(f"{prefix}rope.scaling.original_context_length", int, None)
    scaling, divisors = _scaling(config, prefix, original), _divisors(tensors)
    if divisors and scaling:
        raise ConfigError(
            f"{config.where} has both {' and '.join(divisors)} and {prefix}rope.scaling.type "
            f"{shown(scaling['type'])}; only one of them can hold."
        )
    if "rope_freqs.weight" in divisors:
        scaling = {"type": "divided", "divisors": divisors["rope_freqs.weight"]}
    elif divisors:
        scaling = {
            "type": "longrope",
            "long_factor": divisors.get("rope_factors_long.weight"),
            "short_factor": divisors.get("rope_factors_short.weight"),
            "original_max_position_embeddings": original,
            "attention_factor": config.take(f"{prefix}rope.scaling.attn_factor", float, None),
        }
    if scaling:
        config.put("rope_scaling", scaling)


def _divisors(tensors: Mapping[str, Any]) -> dict[str, list[float]]:
    """Numbers that each rotary pair's frequency is divided by, by the tensors that hold them."""
    return {
        name: [float(divisor) for divisor in tensors[name].decode().reshape(-1)]
        for name in IRRELEVANT
        if name in tensors
    }


def _scaling(config: Config, prefix: str, original: int | None) -> dict[str, Any]:
    """The scaling as a config.json has it, {} for none; keys that its kind has no use for stay untaken."""
    at = f"{prefix}rope.scaling."
    factor = config.take(f"{at}factor", float, None) or config.take(f"{prefix}rope.scale_linear", float, None)
    kind = config.take(f"{at}type", str, "linear" if factor else "none")
    config.discard(f"{at}finetuned")
    if kind == "none":
        return {}
    scaling = {"type": kind, "factor": factor, "original_max_position_embeddings": original or None}
    if kind == "yarn":
        scaling["beta_fast"] = config.take(f"{at}yarn_beta_fast", float, None)
        scaling["beta_slow"] = config.take(f"{at}yarn_beta_slow", float, None)
        extra = config.take(f"{at}attn_factor", float, None)
        if extra is not None and factor:  # llama.cpp multiplies YaRN's own temperature by it
            scaling["attention_factor"] = extra * mscale(factor)
    return scaling
