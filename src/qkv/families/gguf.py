"""GGUF files: their metadata as a configuration, and their own names for tensors.

llama.cpp names keys and tensors alike for every architecture, so one table serves all families;
what differs is how rows of queries and keys are paired, which the file's architecture decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qkv.errors import ConfigError
from qkv.families.config import Config
from qkv.families.family import layer_names

KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}
PARTS = {
    "attention_before": "attn_norm",
    "attention.query": "attn_q",
    "attention.key": "attn_k",
    "attention.value": "attn_v",
    "attention.output": "attn_output",
    "feed_forward_before": "ffn_norm",
    "feed_forward.gate": "ffn_gate",
    "feed_forward.up": "ffn_up",
    "feed_forward.down": "ffn_down",
}
WEIGHTS = {
    "decoder.embedding.weight": "token_embd.weight",
    **layer_names("blk.{layer}", PARTS),
    "decoder.norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
}
# architectures whose files keep the pairs of a rotation side by side
INTERLEAVED = frozenset({"llama", "mistral", "smollm3", "granite"})
# about the file, the tokenizer, or how it was made
OUTSIDE = ("general.", "tokenizer.", "split.", "quantize.", "GGUF.", "imatrix.", "mradermacher.")


def configuration(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Any],
    where: str,
    ignore: Iterable[str] = (),
) -> Config:
    """The file's metadata under the names that families take.

    What the metadata leaves to the tensors is read from them: a vocabulary without a size, biases,
    an output matrix of its own, a divisor for each rotary pair. `tensors` are StoredTensor by name.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ConfigError(f"{where}: general.architecture is missing.")
    prefix, data = f"{architecture}.", dict[str, Any](model_type=architecture)
    for key, value in metadata.items():
        if key.startswith(prefix):
            name = key.removeprefix(prefix)
            data[KEYS.get(name, key)] = value
        elif not key.startswith(OUTSIDE):
            data[key] = value
    _read_rotation(data, metadata, tensors, prefix)
    _read_tensors(data, tensors)
    return Config(data, where, ignore)


def _read_tensors(data: dict[str, Any], tensors: Mapping[str, Any]) -> None:
    if "token_embd.weight" in tensors:
        data.setdefault("vocab_size", tensors["token_embd.weight"].shape[0])
    data["tie_word_embeddings"] = "output.weight" not in tensors
    data["attention_bias"] = "blk.0.attn_output.bias" in tensors
    data["mlp_bias"] = "blk.0.ffn_down.bias" in tensors


def _read_rotation(
    data: dict[str, Any], metadata: Mapping[str, Any], tensors: Mapping[str, Any], prefix: str
) -> None:
    """Pairing, rotated dimensions and scaling, as one `rope_parameters` object."""
    data["rope_interleaved"] = data["model_type"] in INTERLEAVED
    head_dim = data.get("head_dim") or data.get("hidden_size", 0) // data.get("num_attention_heads", 1)
    dims = data.pop(f"{prefix}rope.dimension_count", head_dim)
    if dims != head_dim:
        data["partial_rotary_factor"] = dims / head_dim
    value_length = data.pop(f"{prefix}attention.value_length", head_dim)
    if value_length != head_dim:
        data[f"{prefix}attention.value_length"] = value_length  # no family here has one of its own: refuse
    scaling = _scaling(data, prefix)
    if "rope_freqs.weight" in tensors:
        divisors = [float(d) for d in tensors["rope_freqs.weight"].decode()]
        scaling = {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "factor": 1.0}
    if scaling:
        data["rope_scaling"] = scaling


def _scaling(data: dict[str, Any], prefix: str) -> dict[str, Any] | None:
    kind = data.pop(f"{prefix}rope.scaling.type", None)
    names = {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "attn_factor": "attention_factor",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    found = {ours: data.pop(f"{prefix}rope.scaling.{theirs}", None) for theirs, ours in names.items()}
    data.pop(f"{prefix}rope.scaling.finetuned", None)
    if kind in (None, "none"):
        return None
    return {"rope_type": kind, **{key: value for key, value in found.items() if value is not None}}
