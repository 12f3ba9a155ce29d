"""What published files hold beside the sizes, and what a lenient reading makes of what is not known."""

from __future__ import annotations

from typing import Any

import pytest

from qkv.errors import ConfigError
from qkv.families import Record, describe
from qkv.spec import Experts, Language, SequenceClass

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 16}
BERT = {**LLAMA, "model_type": "bert", "max_position_embeddings": 16, "architectures": ["BertModel"]}
QWEN_EXPERTS = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "head_dim": 8,
}
SEEING = {
    "model_type": "llava",
    "text_config": {**LLAMA, "max_position_embeddings": 64},
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
}


def leniently(data: dict[str, Any]) -> Record:
    record = Record()
    describe(data, record=record)
    return record


@pytest.mark.parametrize(
    ("base", "more"),
    [
        (GPT2, {"n_special": 0, "predict_special_tokens": True, "_num_labels": 1}),
        (BERT, {"emb_size": 32, "sbert_ce_default_activation_function": "Identity"}),
        (QWEN_EXPERTS, {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}),
        (LLAMA, {"_attn_implementation": "eager", "padding": "max_length"}),
    ],
    ids=lambda value: value.get("model_type", "more"),
)
def test_keys_that_change_nothing(base: dict[str, Any], more: dict[str, Any]) -> None:
    assert describe({**base, **more}).model == describe(base).model
    assert leniently({**base, **more}).unknown == {}


@pytest.mark.parametrize(
    ("base", "more"),
    [(GPT2, {"n_special": 3}), (BERT, {"emb_size": 16}), (QWEN_EXPERTS, {"use_qk_norm": False})],
    ids=lambda value: value.get("model_type", "more"),
)
def test_with_another_value_they_are_named(base: dict[str, Any], more: dict[str, Any]) -> None:
    (key,) = more
    with pytest.raises(ConfigError, match=key):
        describe({**base, **more})
    assert leniently({**base, **more}).unknown == more


def test_no_shared_expert_is_zero_wide() -> None:
    found = describe({**QWEN_EXPERTS, "shared_expert_intermediate_size": 0}).model.decoder
    assert found is not None
    experts = found.layers[0].sublayers[1].branches[0].mixer
    assert isinstance(experts, Experts)
    assert experts.shared is None


def test_a_reward_model_scores_the_last_token() -> None:
    file = {**GPT2, "architectures": ["GPT2ForSequenceClassification"], "id2label": {"0": "score"}}
    found, head = describe(file).model, describe(GPT2).model.head
    assert isinstance(head, Language)
    assert isinstance(found.head, SequenceClass)
    assert found.head.classes == 1
    assert found.parameters() == describe(GPT2).model.parameters() + 32


@pytest.mark.parametrize(
    ("base", "name"),
    [(LLAMA, "LlamaForRewards"), (BERT, "BertForPreTraining"), (SEEING, "LlavaForRetrieval")],
    ids=lambda value: value if isinstance(value, str) else value["model_type"],
)
def test_an_unknown_head_leaves_the_layers_known(base: dict[str, Any], name: str) -> None:
    file = {**base, "architectures": [name]}
    with pytest.raises(ConfigError, match=name):
        describe(file)
    record = Record()
    found = describe(file, record=record).model
    assert found.head is None
    assert record.unknown == {"architectures": [name]}


def test_what_stands_inside_is_read_leniently_too() -> None:
    inside = {**SEEING["text_config"], "wobble": 3}  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="text_config: wobble"):
        describe({**SEEING, "text_config": inside})
    record = leniently({**SEEING, "text_config": inside})
    assert record.unknown == {"text_config.wobble": 3}
    assert record.taken["text_config.max_position_embeddings"] == 64
    assert record.taken["vision_config.patch_size"] == 14
    assert "text_config.rms_norm_eps" not in record.taken  # the class's, not the file's
    assert "text_config.architectures" not in record.taken


def test_other_names_are_recorded_as_the_file_has_them() -> None:
    file = {
        **{"model_type": "distilbert", "vocab_size": 61, "dim": 32, "n_heads": 4, "n_layers": 2},
        **{"hidden_dim": 48, "max_position_embeddings": 16, "wobble": 3},
    }
    record = leniently(file)
    assert record.unknown == {"wobble": 3}
    assert {key: record.taken[key] for key in ("dim", "n_heads", "hidden_dim")} == {
        "dim": 32,
        "n_heads": 4,
        "hidden_dim": 48,
    }


@pytest.mark.parametrize(
    ("packed", "said"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"quantization_config": {"quant_algo": "FP8"}}, "FP8"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "4 bits"),
    ],
)
def test_packed_weights_are_said_as_the_file_does(packed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"packed as '{said}'"):
        describe({**LLAMA, **packed})
    assert leniently({**LLAMA, **packed}).unknown == dict.fromkeys(packed, said)


def test_parts_that_are_not_described_are_listed() -> None:
    text = {**LLAMA, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size_mlp": 40}
    text |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    assert leniently({"model_type": "llama4", "text_config": text}).unknown == {"vision_config": None}
