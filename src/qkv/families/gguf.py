"""GGUF files: their metadata as a configuration, and their own names for tensors.

llama.cpp names keys and tensors alike for every architecture, so one table serves all families;
what differs is how rows of queries and keys are paired, which the file's architecture decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from qkv.errors import ConfigError
from qkv.families.config import Config, Record, shown
from qkv.families.weights import layer_names
from qkv.spec.rotary import mscale

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
IRRELEVANT = ("rope_freqs.weight",)  # read as part of the configuration
# architectures whose tensors are known here; their files keep the pairs of a rotation side by side
LOADABLE = frozenset({"llama", "mistral", "smollm3", "granite"})
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
# what llama.cpp knows by the architecture's name, and files therefore do not say
UNSAID = {"smollm3": {"no_rope_layer_interval": 4}}


def architecture(metadata: Mapping[str, Any], where: str) -> str:
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ConfigError(f"{where}: general.architecture is missing.")
    return name


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
    prefix = f"{kind}."
    names = {f"{prefix}{theirs}": ours for theirs, ours in KEYS.items()}
    data = {
        names.get(key, key if "." in key else f"{key} (outside {prefix})"): _plain(value)
        for key, value in metadata.items()
        if not key.startswith(OUTSIDE) and not _says_nothing(key.removeprefix(prefix), value)
    }
    called = {ours: theirs for theirs, ours in names.items()}
    called |= {
        "rope_scaling": f"{prefix}rope.scaling",
        "rotary_dim": f"{prefix}rope.dimension_count",
        "divisors": "rope_freqs.weight",
    }
    data |= {"model_type": kind, **UNSAID.get(kind, {})}
    config = Config(data, where, ignore, called, record)
    _read_rotation(config, tensors, prefix)
    _read_tensors(config, tensors)
    return config


def _plain(value: Any) -> Any:
    """A float as it was meant: files hold 1e-5 as the float32 next to it."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _says_nothing(key: str, value: Any) -> bool:
    return key in NEUTRAL and isinstance(value, int | float) and value == NEUTRAL[key]


def _read_tensors(config: Config, tensors: Mapping[str, Any]) -> None:
    embedding = tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape and "vocab_size" not in config:
        config.put("vocab_size", embedding.shape[0])
    config.put("tie_word_embeddings", "output.weight" not in tensors)
    config.put("attention_bias", "blk.0.attn_output.bias" in tensors)
    config.put("mlp_bias", "blk.0.ffn_down.bias" in tensors)


def _read_rotation(config: Config, tensors: Mapping[str, Any], prefix: str) -> None:
    """Pairing, rotated dimensions and scaling, under the names of a config.json."""
    config.put("rope_interleaved", config.peek("model_type") in LOADABLE)
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
    scaling, divisors = _scaling(config, prefix), tensors.get("rope_freqs.weight")
    if divisors is not None and scaling:
        raise ConfigError(
            f"{config.where} has both rope_freqs.weight and {prefix}rope.scaling.type "
            f"{shown(scaling['type'])}; only one of them can hold."
        )
    if divisors is not None:
        values = [float(divisor) for divisor in divisors.decode().reshape(-1)]
        scaling = {"type": "divided", "divisors": values}
    if scaling:
        config.put("rope_scaling", scaling)


def _scaling(config: Config, prefix: str) -> dict[str, Any]:
    """The scaling as a config.json has it, {} for none; keys that its kind has no use for stay untaken."""
    at = f"{prefix}rope.scaling."
    factor = config.take(f"{at}factor", float, None) or config.take(f"{prefix}rope.scale_linear", float, None)
    kind = config.take(f"{at}type", str, "linear" if factor else "none")
    original = config.take(f"{at}original_context_length", int, None)
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
