"""GGUF files of each architecture, written from a random model of transformers, give its logits.

The names in the files are those that the `gguf` package has for transformers' tensors. transformers
itself reads the same files where it knows the architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from qkv import loading
from qkv.checkpoints import read_gguf
from qkv.errors import ConfigError
from qkv.families import describe_gguf
from qkv.families.architectures import ARCHITECTURES
from qkv.loading.network import stored_tensors
from qkv.spec import Causal, LongRope, RMSNorm, Score, Window
from tests.families.models import oracle, tokens
from tests.support import assert_close

Weights = dict[str, np.ndarray]


def as_they_are(name: str, values: np.ndarray) -> np.ndarray:
    return values


def whole_norms(name: str, values: np.ndarray) -> np.ndarray:
    return values + 1 if name.endswith("norm.weight") else values


def turned(name: str, values: np.ndarray) -> np.ndarray:
    """GPT-2's matrices as (out, in)."""
    return values.T if ".attn." in name or ".mlp." in name else values


def flat(name: str, values: np.ndarray) -> np.ndarray:
    return values[0] if name.endswith("shared_expert_gate.weight") else values


@dataclass(frozen=True)
class Case:
    """A small model of transformers, and what its converter would write beside the common keys."""

    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    stored: Callable[[str, np.ndarray], np.ndarray] = as_they_are
    tolerance: float = 1e-5


GEMMA: dict[str, Any] = {"num_hidden_layers": 7, "head_dim": 12, "query_pre_attn_scalar": 12}
HEADS = {"attention.key_length": 12, "attention.value_length": 12}
MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EXPERTS = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 24}
CASES = {
    "gemma": Case("gemma", {"head_dim": 12}, HEADS, whole_norms),
    "gemma2": Case(
        "gemma2",
        {**GEMMA, "sliding_window": 5, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
        {
            **HEADS,
            "attention.sliding_window": 5,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
        },
        whole_norms,
    ),
    "gemma3": Case(
        "gemma3_text",
        {**GEMMA, "sliding_window": 5},
        {**HEADS, "attention.sliding_window": 5},
        whole_norms,
    ),
    "gpt2": Case("gpt2", {"n_inner": 64}, {"attention.layer_norm_epsilon": 1e-5}, turned),
    "olmo2": Case("olmo2"),
    "phi3": Case("phi3", {}, {"rope.scaling.original_context_length": 64, "rope.dimension_count": 8}),
    "qwen2": Case("qwen2"),
    "qwen2moe": Case(
        "qwen2_moe",
        {**MOE, "shared_expert_intermediate_size": 40},
        {**EXPERTS, "expert_shared_feed_forward_length": 40},
        flat,
        1e-4,
    ),
    "qwen3": Case("qwen3", {"head_dim": 12}, HEADS),  # it leaves head_dim
    "qwen3moe": Case(
        "qwen3_moe",
        {**MOE, "head_dim": 12, "norm_topk_prob": True},
        {**EXPERTS, **HEADS},
        tolerance=1e-4,
    ),
}


def test_every_architecture_has_a_case() -> None:
    """Those of Llama's kind, whose rotations are stored otherwise, stand in test_gguf.py."""
    assert set(CASES) == {name for name, told in ARCHITECTURES.items() if not told.interleaved}


def model_of(case: Case) -> transformers.PreTrainedModel:
    return oracle(case.model_type, **case.changes)


def common(model: transformers.PreTrainedModel) -> dict[str, Any]:
    config = model.config
    found = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", 64),
        "attention.head_count": config.num_attention_heads,
    }
    if config.model_type == "gpt2":
        return found
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    return found | {
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
    }


def weights_of(architecture: str, model: transformers.PreTrainedModel, case: Case) -> Weights:
    """Under the names that the `gguf` package has for them."""
    number = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
    found = {}
    for name, values in expanded(model):
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        found[theirs] = case.stored(name, values)
    return found


def expanded(model: transformers.PreTrainedModel) -> list[tuple[str, np.ndarray]]:
    """The parameters, fused stacks of experts as the three stacks that files hold."""
    found = []
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            gate, up = np.split(values, 2, axis=1)
            found += [(f"{stem}gate_proj.weight", gate), (f"{stem}up_proj.weight", up)]
        elif name.endswith("experts.down_proj"):
            found.append((f"{name}.weight", values))
        else:
            found.append((name, values))
    return found


def write(path: Path, architecture: str, metadata: dict[str, Any], weights: Weights) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata.items():
        adders[type(value)](f"{architecture}.{key}", value)
    for name, values in weights.items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def written(folder: Path, name: str) -> tuple[Path, transformers.PreTrainedModel]:
    case = CASES[name]
    model = model_of(case)
    metadata = common(model) | case.metadata
    return write(folder / "m.gguf", name, metadata, weights_of(name, model, case)), model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found = model(tokens())
    return found if isinstance(found, torch.Tensor) else found.logits


@pytest.mark.parametrize("name", CASES)
def test_logits(tmp_path: Path, name: str) -> None:
    path, theirs = written(tmp_path, name)
    assert_close(logits(loading.load(path).model), logits(theirs), CASES[name].tolerance)


@pytest.mark.parametrize("name", CASES)
def test_the_table_reads_backwards(tmp_path: Path, name: str) -> None:
    """What is loaded is written again under the file's names, bit for bit."""
    path, _ = written(tmp_path, name)
    wanted = read_gguf(path).tensors
    found = {tensor.name: tensor for tensor in stored_tensors(loading.load(path))}
    assert found.keys() == wanted.keys()
    for tensor in wanted:
        assert found[tensor].shape == wanted[tensor].shape, tensor
        assert (found[tensor].decode() == wanted[tensor].decode()).all(), tensor


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"gemma", "olmo2"}))  # it does not know these two
def test_transformers_reads_the_same_from_the_file(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors, that is: of several configurations it would leave half at its defaults."""
    path, model = written(tmp_path, name)
    # needed for placing parts of a model on several devices only, and this is one
    monkeypatch.setattr(transformers.modeling_utils, "is_accelerate_available", lambda: True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file=path.name,
        config=model.config,
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()
    assert_close(logits(loading.load(path).model), logits(theirs), CASES[name].tolerance)


# what files leave out


def described(architecture: str, tensors: dict[str, Any] | None = None, **metadata: Any) -> Any:
    """A description from a small model's metadata, without some of it where it is None."""
    case = CASES[architecture]
    known = common(model_of(case)) | case.metadata | metadata
    data = {f"{architecture}.{key}": value for key, value in known.items() if value is not None}
    return describe_gguf({"general.architecture": architecture, **data}, tensors or {}, "m.gguf")


def mixers(found: Any) -> list[Any]:
    return [layer.sublayers[0].branches[0].mixer for layer in found.model.trunk.layers]


def test_gemma_3_has_a_window_in_five_of_six_layers_and_a_base_of_their_own() -> None:
    found = mixers(described("gemma3"))
    assert [mixer.mask == Causal() & Window(5) for mixer in found] == [True] * 5 + [False, True]
    assert [mixer.position.theta for mixer in found] == [1e4] * 5 + [1e6, 1e4]
    found = mixers(described("gemma3", **{"rope.freq_base_swa": 500.0}))
    assert [mixer.position.theta for mixer in found] == [500.0] * 5 + [1e6, 500.0]


@pytest.mark.parametrize(("name", "largest"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_by_its_width(name: str, largest: int) -> None:
    """llama.cpp: 1 / sqrt(width / heads) in the 27B, 1 / sqrt(head_dim) in all others."""
    for depth, wanted in ((largest - 1, 12), (largest, 8)):
        assert mixers(described(name, block_count=depth))[0].score.scale == pytest.approx(wanted**-0.5)


def test_gemma_2_has_the_window_and_caps_of_its_architecture() -> None:
    caps = dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"))
    without = described("gemma2", context_length=8192, **{**caps, "attention.sliding_window": None})
    assert mixers(without)[0].score == Score(12**-0.5, cap=50.0)
    assert mixers(without)[0].mask == Causal() & Window(4096)
    assert without.model.head.cap == 30.0


def test_norms_are_stored_whole() -> None:
    found = described("gemma3")
    assert found.model.trunk.norm == RMSNorm(1e-6)
    assert mixers(found)[0].projections.norm == RMSNorm(1e-6)


class Stored:
    """What describe_gguf asks of a tensor."""

    def __init__(self, *values: float):
        self.values = np.array(values, np.float32)

    def decode(self) -> np.ndarray:
        return self.values


def test_phi_3_divides_its_frequencies_by_two_tensors() -> None:
    tensors = {
        "rope_factors_long.weight": Stored(1.0, 2.0, 4.0, 8.0),
        "rope_factors_short.weight": Stored(1.0, 1.0, 1.5, 1.5),
    }
    scaling = mixers(described("phi3", tensors, context_length=256, **{"rope.scaling.attn_factor": 1.25}))
    assert scaling[0].position.scaling == LongRope(
        short=(1.0, 1.0, 1.5, 1.5), long=(1.0, 2.0, 4.0, 8.0), original=64, factor=4.0, attention_factor=1.25
    )
    tensors.pop("rope_factors_short.weight")
    with pytest.raises(ConfigError, match=r"rope_factors_short.weight is missing"):
        described("phi3", tensors)
