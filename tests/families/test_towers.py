"""Pairs of models for text and images, and language models that see: read as transformers builds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from qkv.errors import ConfigError
from qkv.spec import Axes, Causal, CrossAttention, Dense, Everything, Patches, PooledEmbedding, Rotary
from tests.families.reading import TEXT, VISION, count, describe, read, saved, self_attention, tokens

# --- pairs ------------------------------------------------------------------------------------


def test_clip_text_is_causal_and_images_begin_with_a_norm() -> None:
    text = describe(hf.CLIPTextConfig(), "CLIPTextModelWithProjection")
    assert self_attention(text.model.encoder, 0).mask == Causal() and text.context == 77
    assert isinstance(text.model.head, PooledEmbedding) and text.model.head.pool.how == "last"
    vision = describe(hf.CLIPVisionConfig(), "CLIPVisionModelWithProjection").model
    assert vision.encoder is not None and isinstance(vision.encoder.input, Patches)
    assert vision.encoder.input.norm is not None and not vision.encoder.input.bias
    dense = vision.encoder.layers[0].sublayers[1].branches[0].mixer
    assert isinstance(dense, Dense) and dense.activation == "quick_gelu"
    assert isinstance(vision.head, PooledEmbedding) and not vision.head.normalise


def test_siglip_text_sees_everything_and_an_image_answers_a_query() -> None:
    text = describe(hf.SiglipTextConfig(), "SiglipTextModel").model
    assert self_attention(text.encoder, 0).mask == Everything()
    vision = describe(hf.SiglipVisionConfig(), "SiglipVisionModel").model
    assert vision.decoder is not None and tokens(vision.decoder).vocab == 1
    read_step = vision.decoder.layers[0].sublayers[0]
    assert isinstance(read_step.branches[0].mixer, CrossAttention) and read_step.skip == 0.0


CLIP = hf.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=14)
SIGLIP = hf.SiglipConfig(text_config=TEXT | {"projection_size": 35}, vision_config=VISION)


@pytest.mark.parametrize(("pair", "kind"), [(CLIP, hf.CLIPModel), (SIGLIP, hf.SiglipModel)])
def test_a_pair_is_described_one_half_at_a_time(pair: Any, kind: Any) -> None:
    with pytest.raises(ConfigError, match="a pair of models") as caught:
        describe(pair, kind.__name__)
    assert 'ignore=("text_config",)' in str(caught.value)
    images = describe(pair, kind.__name__, ignore=("text_config",)).model
    text = describe(pair, kind.__name__, ignore=("vision_config",)).model
    both = count(kind, pair, ("logit_scale", "logit_bias"))
    assert images.parameters() + text.parameters() == both
    for model in (images, text):
        assert isinstance(model.head, PooledEmbedding) and model.head.normalise


def test_a_pair_of_which_one_half_is_asked_for() -> None:
    images = describe(CLIP, "CLIPVisionModel")
    assert images.model.head is None and images.context == 26
    assert images.model.parameters() == count(hf.CLIPVisionModel, CLIP.vision_config)
    text = describe(CLIP, "CLIPTextModelWithProjection")  # projects by its own number
    assert text.model.parameters() == count(hf.CLIPTextModelWithProjection, CLIP.text_config)


def test_a_half_that_is_said_twice_is_read_as_the_second() -> None:
    again = saved(CLIP, "CLIPTextModel", text_config_dict={**TEXT, "hidden_size": 40})
    assert read(again).model.trunk.width == 40


def test_a_pair_that_leaves_out_sizes() -> None:
    data = {"model_type": "clip", "architectures": ["CLIPTextModel"], "text_config": {}}
    assert read(data).model.parameters() == count(hf.CLIPTextModel, hf.CLIPTextConfig())


# --- models with a tower ----------------------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 52,
    "max_position_embeddings": 64,
}


def test_llava() -> None:
    """The class's default, and the file of 1.5 7B, which leaves out what the classes know."""
    config = hf.LlavaConfig()
    found = describe(config, "LlavaForConditionalGeneration")
    assert found.model.parameters() == count(hf.LlavaForConditionalGeneration, config)
    published = {
        "architectures": ["LlavaForConditionalGeneration"],
        "ignore_index": -100,
        "image_token_index": 32000,
        "model_type": "llava",
        "pad_token_id": 32001,
        "projector_hidden_act": "gelu",
        "text_config": {
            "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "rms_norm_eps": 1e-05,
            "vocab_size": 32064,
        },
        "tie_word_embeddings": False,
        "vision_config": {
            "hidden_size": 1024,
            "image_size": 336,
            "intermediate_size": 4096,
            "model_type": "clip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
            "projection_dim": 768,
            "vocab_size": 32000,
        },
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "vocab_size": 32064,
    }
    seven = read(published)
    assert seven.model.parameters() == 7_063_427_072 and seven.context == 4096
    tower = seven.model.towers[0]
    assert tower.take_layer == -2 and tower.first_row == 1
    assert tower.stack.input.rows(0) - tower.first_row == 576


@pytest.mark.parametrize(("kind", "last"), [("clip_vision_model", -1), ("siglip_vision_model", -3)])
def test_llava_small(kind: str, last: int) -> None:
    extra = {"vision_use_head": False} if kind == "siglip_vision_model" else {}
    config = hf.LlavaConfig(
        text_config=LLAMA,
        vision_config={**VISION, **extra, "model_type": kind},
        image_token_index=96,
        multimodal_projector_bias=False,
        vision_feature_select_strategy="full",
        vision_feature_layer=last,
    )
    model = describe(config, "LlavaForConditionalGeneration").model
    assert model.parameters() == count(hf.LlavaForConditionalGeneration, config)
    assert model.towers[0].take_layer == (2 if last == -1 else last) and model.towers[0].first_row == 0
    assert describe(config, "LlavaModel").model.head is None
    tied = describe(config, "LlavaForConditionalGeneration", tie_word_embeddings=True).model
    assert model.parameters() - tied.parameters() == 97 * 36
    with pytest.raises(ConfigError, match="vision_feature_layer"):
        describe(config, "LlavaModel", vision_feature_layer=[-2, -1])


DEEPSTACK = ("deepstack_merger_list",)
QWEN_TEXT = {
    "vocab_size": 97,
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 52,
    "attention_bias": True,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 7e5, "mrope_section": [4, 2, 2]},
}
QWEN_VISION = {
    "depth": 3,
    "hidden_size": 40,
    "num_heads": 5,
    "intermediate_size": 44,
    "patch_size": 4,
    "spatial_merge_size": 3,
    "temporal_patch_size": 2,
    "out_hidden_size": 36,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [1],
}


def qwen_small(tie: bool = False) -> Any:
    return hf.Qwen3VLConfig(text_config=QWEN_TEXT, vision_config=QWEN_VISION, tie_word_embeddings=tie)


def test_qwen3_vl_equals_transformers_but_for_deepstack() -> None:
    kind = hf.Qwen3VLForConditionalGeneration
    default = hf.Qwen3VLConfig(vision_config={"out_hidden_size": 4096})
    for config in (default, qwen_small(), qwen_small(tie=True)):
        assert describe(config, kind.__name__).model.parameters() == count(kind, config, DEEPSTACK)
    assert describe(qwen_small(), "Qwen3VLModel").model.head is None


def test_qwen3_vl_as_published(shared_folder: Path) -> None:
    data = json.loads((shared_folder / "configs" / "Qwen--Qwen3-VL-8B-Instruct_config.json").read_text())
    found, config = read(data), hf.Qwen3VLConfig(**json.loads(json.dumps(data)))
    kind = hf.Qwen3VLForConditionalGeneration
    assert found.model.parameters() == count(kind, config, DEEPSTACK)
    assert found.context == 262144
    position = self_attention(found.model.decoder, 0).position
    assert position == Rotary(5e6, axes=Axes((24, 20, 20), "interleaved"))
    tower = found.model.towers[0]
    assert tower.projector is not None and tower.projector.merge == 4


def test_qwen3_vl_positions_in_both_spellings() -> None:
    new = saved(qwen_small(), "Qwen3VLModel")
    old = json.loads(json.dumps(new))
    del old["text_config"]["rope_parameters"], old["vision_config"]["rope_parameters"]
    old["text_config"]["rope_theta"] = 7e5
    old["text_config"]["rope_scaling"] = {
        "mrope_interleaved": True,
        "mrope_section": [4, 2, 2],
        "rope_type": "default",
    }
    assert read(old) == read(new)
    position = self_attention(read(new).model.decoder, 0).position
    assert position == Rotary(7e5, axes=Axes((4, 2, 2), "interleaved"))
