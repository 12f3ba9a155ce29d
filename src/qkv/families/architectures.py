"""What llama.cpp's architectures call their keys and tensors, and what it knows of them by their name.

The names are those of its `gguf` package; nearly all are the same for every architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from qkv.families.config import Config
from qkv.families.weights import KINDS, Place, Table, fused, layer_names
from qkv.spec import RMSNorm
from qkv.spec.node import Node

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
EXPERT_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
CAP_KEYS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
PARTS: dict[str, str | Place] = {
    "attention_before": "attn_norm",
    "attention.query": "attn_q",
    "attention.key": "attn_k",
    "attention.value": "attn_v",
    "attention.query_norm": "attn_q_norm",
    "attention.key_norm": "attn_k_norm",
    "attention.output": "attn_output",
    "attention_after": "post_attention_norm",
    "feed_forward_before": "ffn_norm",
    "feed_forward.gate": "ffn_gate",
    "feed_forward.up": "ffn_up",
    "feed_forward.down": "ffn_down",
    "feed_forward_after": "post_ffw_norm",
    "feed_forward.router": "ffn_gate_inp",
    "feed_forward.expert.gate": "ffn_gate_exps",
    "feed_forward.expert.up": "ffn_up_exps",
    "feed_forward.expert.down": "ffn_down_exps",
    "feed_forward.shared_expert.gate": "ffn_gate_shexp",
    "feed_forward.shared_expert.up": "ffn_up_shexp",
    "feed_forward.shared_expert.down": "ffn_down_shexp",
}
QKV = fused("attn_qkv", "attention.query", "attention.key", "attention.value")
# what of a config.json the presence of a tensor answers
BIASES = {"attention_bias": "blk.0.attn_output.bias", "mlp_bias": "blk.0.ffn_down.bias"}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A value of general.architecture, and the model type whose configuration says the same.

    `keys` and `parts` are those that differ from, or add to, what all have; `biases` are keys that
    tensors answer. `unsaid` are values that files leave out since llama.cpp goes by the name, and
    `complete` works out those that depend on others. `interleaved`: the pairs of a rotation were put
    side by side. `whole_norms`: norms whose checkpoints hold the scale less one have it whole here.
    """

    family: str
    keys: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str | Place] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=lambda: BIASES)
    unsaid: Mapping[str, object] = field(default_factory=dict)
    complete: Callable[[Config], None] | None = None
    interleaved: bool = False
    whole_norms: bool = False

    def weights(self, width: int) -> Table:
        """Where the tensors of a model of this width stand."""
        return {
            "decoder.embedding.weight": "token_embd.weight",
            "decoder.embedding.position.weight": "position_embd.weight",
            **layer_names("blk.{layer}", {**PARTS, **self.parts}),
            # a matrix of one row is stored as a vector
            "decoder.layers.{layer}.feed_forward.shared_gate.weight": Place(
                "blk.{layer}.ffn_gate_inp_shexp.weight", shape=(width,)
            ),
            **{f"decoder.norm.{kind}": f"output_norm.{kind}" for kind in KINDS},
            "head.weight": "output.weight",
        }


def whole_norms(part: Any) -> Any:
    """The same description, or part of one, whose norms' scales are stored whole."""
    if isinstance(part, tuple):
        return tuple(map(whole_norms, part))
    if not isinstance(part, Node):
        return part
    if isinstance(part, RMSNorm):
        return replace(part, offset=0.0)
    return replace(part, **{f.name: whole_norms(getattr(part, f.name)) for f in fields(part)})


def _gemma_scale(largest: int) -> Callable[[Config], None]:
    """A head's size scales its scores, but in the model of so many layers the width a head would have."""

    def complete(config: Config) -> None:
        share = config.size("hidden_size") // config.size("num_attention_heads")
        head_dim = config.size("head_dim", share)
        is_largest = config.peek("num_hidden_layers") == largest
        config.put("query_pre_attn_scalar", share if is_largest else head_dim)

    return complete


ARCHITECTURES = {
    **{
        name: Architecture(family=name, interleaved=True) for name in ("llama", "mistral", "granite")
    },
    "smollm3": Architecture(family="smollm3", unsaid={"no_rope_layer_interval": 4}, interleaved=True),
    "gemma": Architecture(family="gemma", whole_norms=True),
    "gemma2": Architecture(
        family="gemma2",
        keys=CAP_KEYS,
        unsaid={
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        complete=_gemma_scale(largest=46),
        whole_norms=True,
    ),
    "gemma3": Architecture(
        family="gemma3",
        keys={**CAP_KEYS, "rope.freq_base_swa": "rope_local_base_freq"},
        complete=_gemma_scale(largest=62),
        whole_norms=True,
    ),
    "gpt2": Architecture(
        family="gpt2",
        keys={"feed_forward_length": "n_inner", "attention.layer_norm_epsilon": "layer_norm_epsilon"},
        parts=QKV,
        biases={},
    ),
    "olmo2": Architecture(family="olmo2", biases={}),
    "phi3": Architecture(
        family="phi3",
        parts={**QKV, **fused("ffn_up", "feed_forward.gate", "feed_forward.up")},
        biases={},
    ),
    "qwen2": Architecture(family="qwen2", biases={}),
    "qwen2moe": Architecture(family="qwen2_moe", keys=EXPERT_KEYS, biases={"qkv_bias": "blk.0.attn_q.bias"}),
    "qwen3": Architecture(family="qwen3"),
    "qwen3moe": Architecture(
        family="qwen3_moe", keys=EXPERT_KEYS, unsaid={"norm_topk_prob": True}
    ),
}  # fmt: skip
