"""Encoders and encoder-decoders, read from the configurations of transformers' classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from qkv.errors import ConfigError
from qkv.spec import (
    Buckets,
    Causal,
    Dense,
    Disentangled,
    DynamicNTK,
    Everything,
    Gated,
    Interpolation,
    Language,
    Learned,
    Model,
    Pool,
    Rotary,
    SequenceClass,
    Sinusoidal,
    Stack,
    Window,
)
from tests.families.reading import (
    FAMILIES,
    TEXT,
    VISION,
    count,
    describe,
    read,
    saved,
    self_attention,
    tokens,
)

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 35,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "intermediate_size": 52,
    "pad_token_id": 0,
}
BERT = {**SMALL, "max_position_embeddings": 41, "type_vocab_size": 3}
DISTIL = {
    "vocab_size": 97,
    "dim": 35,
    "n_layers": 3,
    "n_heads": 5,
    "hidden_dim": 52,
    "max_position_embeddings": 41,
}
DEBERTA = {
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": "p2c|c2p",
    "position_buckets": 12,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "max_relative_positions": -1,
}
MODERN = {
    **SMALL,
    "hidden_size": 30,
    "num_hidden_layers": 4,
    "local_attention": 10,
    "norm_bias": True,
    "attention_bias": True,
    "mlp_bias": True,
    "classifier_bias": True,
    "decoder_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
NOMIC = {**SMALL, "hidden_size": 30, "head_dim": 10, "type_vocab_size": 3}
T5 = {
    "d_model": 36,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 5,
    "d_kv": 10,
    "d_ff": 52,
    "vocab_size": 97,
    "relative_attention_num_buckets": 10,
    "relative_attention_max_distance": 30,
}
BART = {
    "vocab_size": 97,
    "d_model": 36,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 52,
    "decoder_ffn_dim": 44,
    "max_position_embeddings": 30,
    "pad_token_id": 0,
}
WHISPER = {
    **BART,
    "num_mel_bins": 11,
    "max_source_positions": 50,
    "max_target_positions": 20,
}
del WHISPER["max_position_embeddings"]
LABELS = {"id2label": {i: f"L{i}" for i in range(7)}}
POOLED = ("pooler",)
SINUSOIDS = ("embed_positions",)

# name: (configuration, class, parameters of the class that are none of the description)
CASES: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "bert": (hf.BertConfig(), hf.BertModel, POOLED),
    "bert masked": (hf.BertConfig(**BERT), hf.BertForMaskedLM, ()),
    "bert masked untied": (
        hf.BertConfig(**BERT, tie_word_embeddings=False), hf.BertForMaskedLM, ("predictions.bias",)
    ),
    "bert sequence": (hf.BertConfig(**BERT, **LABELS), hf.BertForSequenceClassification, ()),
    "bert token": (hf.BertConfig(**BERT, **LABELS), hf.BertForTokenClassification, ()),
    "bert span": (hf.BertConfig(**BERT), hf.BertForQuestionAnswering, ()),
    "bert choice": (hf.BertConfig(**BERT), hf.BertForMultipleChoice, ()),
    "bert next": (hf.BertConfig(**BERT), hf.BertForNextSentencePrediction, ()),
    "roberta": (hf.RobertaConfig(max_position_embeddings=514), hf.RobertaForMaskedLM, ()),
    "roberta small": (hf.RobertaConfig(**BERT), hf.RobertaModel, POOLED),
    "xlm-roberta": (hf.XLMRobertaConfig(max_position_embeddings=514), hf.XLMRobertaForMaskedLM, ()),
    "xlm-roberta small": (hf.XLMRobertaConfig(**BERT), hf.XLMRobertaModel, POOLED),
    "camembert": (hf.CamembertConfig(max_position_embeddings=514), hf.CamembertForMaskedLM, ()),
    "camembert small": (hf.CamembertConfig(**BERT), hf.CamembertModel, POOLED),
    "roberta sequence": (hf.RobertaConfig(**BERT, **LABELS), hf.RobertaForSequenceClassification, ()),
    "distilbert": (hf.DistilBertConfig(), hf.DistilBertForMaskedLM, ()),
    "distilbert small": (hf.DistilBertConfig(**DISTIL), hf.DistilBertModel, ()),
    "distilbert sequence": (
        hf.DistilBertConfig(**DISTIL, **LABELS), hf.DistilBertForSequenceClassification, ()
    ),
    "albert": (hf.AlbertConfig(), hf.AlbertForMaskedLM, ()),
    "albert groups": (
        hf.AlbertConfig(**BERT, embedding_size=14, num_hidden_groups=2, inner_group_num=2),
        hf.AlbertModel, POOLED
    ),
    "albert sequence": (
        hf.AlbertConfig(**BERT, embedding_size=35, **LABELS), hf.AlbertForSequenceClassification, ()
    ),
    "electra": (hf.ElectraConfig(), hf.ElectraForMaskedLM, ()),
    "electra even": (hf.ElectraConfig(**BERT, embedding_size=35), hf.ElectraModel, ()),
    "electra sequence": (
        hf.ElectraConfig(**BERT, embedding_size=14, **LABELS), hf.ElectraForSequenceClassification, ()
    ),
    "deberta-v2 plain": (hf.DebertaV2Config(), hf.DebertaV2Model, ()),
    "deberta-v3": (hf.DebertaV2Config(**SMALL, **DEBERTA), hf.DebertaV2Model, ()),
    "deberta-v3 narrow": (
        hf.DebertaV2Config(**SMALL, **DEBERTA, embedding_size=14), hf.DebertaV2ForMaskedLM, ()
    ),
    "deberta-v3 masked": (
        hf.DebertaV2Config(**SMALL, **DEBERTA, legacy=False), hf.DebertaV2ForMaskedLM, ()
    ),
    "deberta-v3 sequence": (
        hf.DebertaV2Config(**SMALL, **DEBERTA, **LABELS), hf.DebertaV2ForSequenceClassification, ()
    ),
    "modernbert": (hf.ModernBertConfig(), hf.ModernBertForMaskedLM, ()),
    "modernbert small": (hf.ModernBertConfig(**MODERN), hf.ModernBertForMaskedLM, ()),
    "modernbert sequence": (
        hf.ModernBertConfig(**MODERN, **LABELS, classifier_pooling="mean"),
        hf.ModernBertForSequenceClassification, ()
    ),
    "vit": (hf.ViTConfig(), hf.ViTModel, POOLED),
    "vit classes": (
        hf.ViTConfig(**VISION | {"image_size": [36, 29]}, qkv_bias=False, **LABELS),
        hf.ViTForImageClassification, ()
    ),
    "clip text": (hf.CLIPTextConfig(), hf.CLIPTextModel, ()),
    "clip text projected": (
        hf.CLIPTextConfig(**TEXT, projection_dim=14), hf.CLIPTextModelWithProjection, ()
    ),
    "clip vision": (hf.CLIPVisionConfig(), hf.CLIPVisionModel, ()),
    "clip vision projected": (
        hf.CLIPVisionConfig(**VISION, projection_dim=14), hf.CLIPVisionModelWithProjection, ()
    ),
    "siglip text": (hf.SiglipTextConfig(), hf.SiglipTextModel, ()),
    "siglip text small": (hf.SiglipTextConfig(**TEXT, projection_size=14), hf.SiglipTextModel, ()),
    "siglip vision": (hf.SiglipVisionConfig(), hf.SiglipVisionModel, ()),
    "siglip vision bare": (
        hf.SiglipVisionConfig(**VISION, vision_use_head=False), hf.SiglipVisionModel, ()
    ),
    "t5": (hf.T5Config(), hf.T5ForConditionalGeneration, ()),
    "t5 small": (hf.T5Config(**T5), hf.T5Model, ()),
    "t5 encoder": (hf.T5Config(**T5, feed_forward_proj="gated-silu"), hf.T5EncoderModel, ()),
    "t5 sequence": (hf.T5Config(**T5, **LABELS), hf.T5ForSequenceClassification, ()),
    "t5 token": (hf.T5Config(**T5, **LABELS), hf.T5ForTokenClassification, ()),
    "t5 span": (hf.T5Config(**T5), hf.T5ForQuestionAnswering, ()),
    "mt5": (hf.MT5Config(), hf.MT5ForConditionalGeneration, ()),
    "mt5 small": (hf.MT5Config(**T5), hf.MT5EncoderModel, ()),
    "bart": (hf.BartConfig(), hf.BartForConditionalGeneration, ()),
    "bart small": (hf.BartConfig(**BART, scale_embedding=True), hf.BartModel, ()),
    "bart sequence": (hf.BartConfig(**BART, num_labels=3), hf.BartForSequenceClassification, ()),
    "bart span": (hf.BartConfig(**BART), hf.BartForQuestionAnswering, ()),
    "mbart": (hf.MBartConfig(), hf.MBartForConditionalGeneration, ()),
    "mbart untied": (
        hf.MBartConfig(**BART, tie_word_embeddings=False), hf.MBartForSequenceClassification,
        ("decoder.embed_tokens", "encoder.embed_tokens"),
    ),
    "pegasus": (hf.PegasusConfig(), hf.PegasusForConditionalGeneration, SINUSOIDS),
    "pegasus small": (hf.PegasusConfig(**BART, activation_function="relu"), hf.PegasusModel, SINUSOIDS),
    "marian": (hf.MarianConfig(), hf.MarianModel, SINUSOIDS),
    "marian two tables": (
        hf.MarianConfig(**BART, decoder_vocab_size=83, share_encoder_decoder_embeddings=False),
        hf.MarianModel, SINUSOIDS,
    ),
    "whisper": (hf.WhisperConfig(), hf.WhisperForConditionalGeneration, ()),
    "whisper small": (hf.WhisperConfig(**WHISPER), hf.WhisperModel, ()),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_parameters_equal_transformers(name: str) -> None:
    config, kind, without = CASES[name]
    assert describe(config, kind.__name__).model.parameters() == count(kind, config, without)


def test_every_type_is_compared_twice() -> None:
    compared = [config.model_type for config, _, _ in CASES.values()]
    apart = {"clip", "siglip", "llava", "qwen3_vl", "qwen3_vl_moe", "nomic_bert"}  # below, and by hand
    assert {kind for kind in FAMILIES if compared.count(kind) < 2} == apart


def test_the_published_counts(shared_folder: Path) -> None:
    entries = json.loads((shared_folder / "configs" / "reference_models.json").read_text())
    large = hf.T5Config(d_model=1024, num_layers=24, num_heads=16, d_ff=4096)
    found = describe(large, "T5ForConditionalGeneration").model.parameters()
    assert found == entries["T5-large"]["params"]
    bare = describe(hf.BertConfig(), "BertModel").model.parameters()
    assert bare + 768 * 768 + 768 == entries["BERT-base-uncased"]["params_with_pooler"]


def test_every_shared_configuration_is_read(shared_folder: Path) -> None:
    read_here = []
    for path in sorted((shared_folder / "configs").glob("*_config.json")):
        data = json.loads(path.read_text())
        if data["model_type"] in FAMILIES:
            assert read(data).model.parameters() > 0
            read_here.append(data["model_type"])
    assert read_here == ["qwen3_vl"]


# --- heads ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "architecture", ["BertLMHeadModel", "BertForPreTraining", "Anything", 7, "ElectraForPreTraining"]
)
def test_a_head_that_is_not_known_is_named(architecture: Any) -> None:
    with pytest.raises(ConfigError, match="head is not known") as caught:
        describe(hf.BertConfig(**BERT), architecture)
    assert repr(architecture) in str(caught.value)


def test_the_last_models_of_two_endings_are_told_apart() -> None:
    """T5EncoderModel and MarianMTModel end as bare models do."""
    encoder = describe(hf.T5Config(**T5), "T5EncoderModel").model
    assert encoder.decoder is None and encoder.head is None
    assert isinstance(describe(hf.MarianConfig(**BART), "MarianMTModel").model.head, Language)
    assert isinstance(describe(hf.T5Config(**T5), "T5WithLMHeadModel").model.head, Language)


def test_classes_are_counted_by_their_names() -> None:
    data = saved(hf.BertConfig(**BERT, **LABELS), "BertForSequenceClassification")
    assert isinstance(head := read(data).model.head, SequenceClass) and head.classes == 7
    del data["id2label"]
    assert isinstance(head := read({**data, "num_labels": 4}).model.head, SequenceClass) and head.classes == 4
    assert isinstance(head := read(data).model.head, SequenceClass) and head.classes == 2


def test_unknown_keys_are_named() -> None:
    with pytest.raises(ConfigError, match="relative_something = 3 is not known"):
        describe(hf.BertConfig(**BERT), "BertModel", relative_something=3)
    with pytest.raises(ConfigError, match="position_embedding_type"):
        describe(hf.BertConfig(**BERT), "BertModel", position_embedding_type="relative_key")
    assert describe(hf.BertConfig(**BERT), "BertModel", position_embedding_type="absolute")
    with pytest.raises(ConfigError, match="conv_kernel_size"):
        describe(hf.DebertaV2Config(**SMALL, **DEBERTA), "DebertaV2Model", conv_kernel_size=3)
    with pytest.raises(ConfigError, match="is_decoder"):
        describe(hf.BertConfig(**BERT), "BertModel", is_decoder=True)


def test_a_wrong_width_is_named_as_the_file_names_it() -> None:
    with pytest.raises(ConfigError, match=r"config\.json: dim is 'wide'"):
        describe(hf.DistilBertConfig(**DISTIL), "DistilBertModel", dim="wide")
    with pytest.raises(ConfigError, match="no multiple of 5 heads"):
        describe(hf.BertConfig(**BERT), "BertModel", hidden_size=36)


# --- what a wrong reading would miss ----------------------------------------------------------


def test_bert() -> None:
    found = describe(hf.BertConfig(), "BertForSequenceClassification")
    stack = found.model.encoder
    assert found.context == 512 and tokens(stack).position == Learned(512) and tokens(stack).types == 2
    assert self_attention(stack, 0).mask == Everything()
    assert stack is not None and stack.norm is None
    assert stack.layers[0].sublayers[0].post is not None and stack.layers[0].sublayers[0].before is None
    head = found.model.head
    assert isinstance(head, SequenceClass) and head.pool.dense is not None
    assert head.pool.dense.activation == "tanh"


def test_roberta_counts_positions_behind_the_padding_row() -> None:
    found = describe(hf.RobertaConfig(max_position_embeddings=514), "RobertaModel")
    assert found.context == 512 and tokens(found.model.encoder).position == Learned(514, offset=2)
    zero = describe(hf.RobertaConfig(**BERT), "RobertaModel")  # padding is token 0 there
    assert zero.context == 40 and tokens(zero.model.encoder).position == Learned(41, offset=1)


def test_distilbert_has_no_types_and_its_own_pooler() -> None:
    found = describe(hf.DistilBertConfig(), "DistilBertForSequenceClassification").model
    assert tokens(found.encoder).types == 0
    assert isinstance(found.head, SequenceClass) and found.head.pool.dense is not None
    assert found.head.pool.dense.activation == "relu"


def test_albert_repeats_its_layers() -> None:
    config = hf.AlbertConfig(**BERT | {"num_hidden_layers": 4}, num_hidden_groups=2, inner_group_num=2)
    stack = describe(config, "AlbertModel").model.encoder
    assert stack is not None
    assert [layer.shared for layer in stack.layers] == [
        f"group {group} layer {layer}" for group in (0, 0, 1, 1) for layer in (0, 1)
    ]
    dense = stack.layers[0].sublayers[1].branches[0].mixer
    assert isinstance(dense, Dense) and dense.activation == "gelu_tanh"


def test_electra_projects_where_widths_differ() -> None:
    narrow = tokens(describe(hf.ElectraConfig(), "ElectraModel").model.encoder)
    assert narrow.width == 128 and narrow.projection is not None and narrow.stream == 256
    assert (
        tokens(describe(hf.ElectraConfig(embedding_size=256), "ElectraModel").model.encoder).projection
        is None
    )


def test_deberta_scores_three_kinds() -> None:
    config = hf.DebertaV2Config(**SMALL, **DEBERTA)
    attention = self_attention(describe(config, "DebertaV2Model").model.encoder, 0)
    assert isinstance(attention.score.scale, float)  # type: ignore[union-attr]
    assert attention.score.scale == (3 * 7) ** -0.5  # type: ignore[union-attr]
    position = attention.position
    assert isinstance(position, Disentangled) and not position.own
    assert position.buckets == 12 and position.max_distance == 512 and position.table.rows == 24
    assert position.table.norm is not None
    assert describe(config, "DebertaV2Model", pos_att_type=["c2p"]).model.encoder is not None
    one = describe(config, "DebertaV2Model", pos_att_type=["c2p"]).model.encoder
    assert self_attention(one, 0).score.scale == 14**-0.5  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="share_att_key"):
        describe(config, "DebertaV2Model", share_att_key=False)


def modern_thetas(stack: Stack | None) -> list[tuple[float, bool]]:
    assert stack is not None
    found = []
    for i in range(len(stack.layers)):
        attention = self_attention(stack, i)
        assert isinstance(attention.position, Rotary)
        found.append((attention.position.theta, attention.mask == Everything()))
    return found


def test_modernbert_windows_and_thetas() -> None:
    stack = describe(hf.ModernBertConfig(), "ModernBertModel").model.encoder
    expected = [(1e4, False) if i % 3 else (16e4, True) for i in range(22)]
    assert modern_thetas(stack) == expected
    assert self_attention(stack, 1).mask == Window(65, 64)
    assert stack is not None and stack.layers[0].sublayers[0].before is None
    assert stack.layers[1].sublayers[0].before is not None


def test_modernbert_in_its_first_spelling() -> None:
    new = saved(hf.ModernBertConfig(**MODERN), "ModernBertForMaskedLM")
    old = {key: value for key, value in new.items() if key not in ("layer_types", "rope_parameters")}
    old |= {
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "position_embedding_type": "absolute",
        "layer_norm_eps": 1e-5,
        "reference_compile": None,
    }
    assert read(old) == read(new)
    one_theta = read({**old, "local_rope_theta": None}).model.encoder
    assert {theta for theta, _ in modern_thetas(one_theta)} == {160000.0}
    stretched = read({**old, "rope_scaling": {"type": "linear", "factor": 2.0}}).model.encoder
    position = self_attention(stretched, 1).position
    assert isinstance(position, Rotary) and position.scaling == Interpolation(2.0)


def nomic_count(
    width: int, layers: int, hidden: int, vocab: int, types: int, inner: int | None = None
) -> int:
    """Two tables, their norm; four matrices of attention, three of the gate, two norms."""
    inner = inner or width
    layer = 4 * width * inner + 3 * width * hidden + 2 * 2 * width
    return (vocab + types) * width + 2 * width + layers * layer


NOMIC_FIRST: dict[str, Any] = {
    "model_type": "nomic_bert",
    "architectures": ["NomicBertModel"],
    "activation_function": "swiglu",
    "causal": False,
    "fused_bias_fc": True,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 2048,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": 3072,
    "n_layer": 12,
    "n_positions": 8192,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": 2,
    "type_vocab_size": 2,
    "use_flash_attn": True,
    "use_rms_norm": False,
    "vocab_size": 30528,
}


def test_nomic_bert_in_its_first_spelling() -> None:
    found = read(NOMIC_FIRST)
    assert found.model.parameters() == nomic_count(768, 12, 3072, 30528, 2) == 136_731_648
    assert found.context == 8192
    position = self_attention(found.model.encoder, 0).position
    assert position == Rotary(1000.0, scaling=DynamicNTK(2.0, 2048))
    with pytest.raises(ConfigError, match="prenorm"):
        read({**NOMIC_FIRST, "prenorm": True})
    with pytest.raises(ConfigError, match="qkv_proj_bias"):
        read({**NOMIC_FIRST, "qkv_proj_bias": True})


def nomic_new(**sizes: Any) -> dict[str, Any]:
    names = {"model_type": "nomic_bert", "hidden_act": "silu", "layer_norm_eps": 1e-12}
    rope = {"rope_type": "default", "rope_theta": 1000.0}
    return {**names, "architectures": ["NomicBertModel"], "rope_parameters": rope, **sizes}


def test_nomic_bert_in_its_second_spelling() -> None:
    small = read(nomic_new(**NOMIC))
    assert small.model.parameters() == nomic_count(30, 3, 52, 97, 3, inner=50)
    assert small.context == 2048
    layer = small.model.encoder.layers[0] if small.model.encoder else None
    assert layer is not None and isinstance(layer.sublayers[1].branches[0].mixer, Gated)
    assert layer.sublayers[0].post is not None
    assert self_attention(small.model.encoder, 0).position == Rotary(1000.0)
    second = {k: v for k, v in nomic_new(**NOMIC).items() if k != "rope_parameters"}
    assert read(second) == small
    assert read({**second, "rope_theta": 1000.0}) == small


@pytest.mark.skipif(not hasattr(hf, "NomicBertConfig"), reason="this transformers has no NomicBert")
def test_nomic_bert_equals_transformers() -> None:
    for config in (hf.NomicBertConfig(), hf.NomicBertConfig(**NOMIC, **LABELS)):
        for kind in (hf.NomicBertModel, hf.NomicBertForMaskedLM, hf.NomicBertForSequenceClassification):
            assert describe(config, kind.__name__).model.parameters() == count(kind, config)


def test_t5_scores_are_unscaled_and_tables_shared_within_a_stack() -> None:
    model = describe(hf.T5Config(**T5), "T5ForConditionalGeneration").model
    assert model.encoder is not None and model.decoder is not None
    around, before = self_attention(model.encoder, 0), self_attention(model.decoder, 1)
    assert around.score.scale == before.score.scale == 1.0  # type: ignore[union-attr]
    assert around.position == Buckets(10, 30, True, shared="encoder distances")
    assert before.position == Buckets(10, 30, False, shared="decoder distances")
    assert before.mask == Causal() and around.head_dim == 10
    assert isinstance(model.head, Language) and model.head.scale == 36**-0.5
    assert describe(hf.T5Config(**T5), "T5Model").context is None
    assert describe(hf.T5Config(**T5), "T5Model", n_positions=512).context == 512


def test_t5_one_point_one_has_a_gate_and_a_head_of_its_own() -> None:
    """Whether the file says that it is not tied, or transformers 5 that it does not scale."""
    config = hf.T5Config(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    new = saved(config, "T5ForConditionalGeneration")
    old = {key: value for key, value in new.items() if key != "scale_decoder_outputs"}
    found = read({**old, "tie_word_embeddings": False})
    assert found == read(new)
    tied = count(hf.T5ForConditionalGeneration, config)
    assert found.model.parameters() == tied + 97 * 36
    assert isinstance(found.model.head, Language) and found.model.head.scale == 1.0
    gate = found.model.encoder.layers[0].sublayers[1].branches[0].mixer if found.model.encoder else None
    assert gate == Gated("gelu_tanh", 52)


def test_mt5_is_never_scaled_and_as_tied_as_the_file_says() -> None:
    data = saved(hf.MT5Config(**T5), "MT5ForConditionalGeneration")
    tied, own = read(data).model, read({**data, "tie_word_embeddings": False}).model
    assert isinstance(tied.head, Language) and tied.head.scale == 1.0
    assert own.parameters() - tied.parameters() == 97 * 36
    assert isinstance(tied.encoder, Stack)
    assert tied.encoder.layers[0].sublayers[1].branches[0].mixer == Gated("gelu_tanh", 52)


def test_bart_and_its_kin_are_arranged_differently() -> None:
    def parts(config: Any, name: str) -> tuple[bool, bool, bool, type, float]:
        stack = describe(config, f"{name}ForConditionalGeneration").model.decoder
        assert stack is not None
        added = tokens(stack)
        first = stack.layers[0].sublayers[0].before is not None
        return first, stack.norm is not None, added.norm is not None, type(added.position), added.scale

    assert parts(hf.BartConfig(**BART), "Bart") == (False, False, True, Learned, 1.0)
    assert parts(hf.MBartConfig(**BART, scale_embedding=True), "MBart") == (True, True, True, Learned, 6.0)
    assert parts(hf.PegasusConfig(**BART), "Pegasus") == (True, True, False, Sinusoidal, 1.0)
    assert parts(hf.MarianConfig(**BART), "Marian") == (False, False, False, Sinusoidal, 1.0)
    bart_found = describe(hf.BartConfig(**BART), "BartModel")
    assert bart_found.context == 30 and tokens(bart_found.model.encoder).position == Learned(32, offset=2)
    assert tokens(describe(hf.PegasusConfig(**BART), "PegasusModel").model.encoder).position == Sinusoidal(
        layout="halves"
    )
    assert self_attention(bart_found.model.encoder, 0).heads == 6
    assert self_attention(bart_found.model.decoder, 0).heads == 4


def test_marian_adds_a_trained_bias_to_its_logits() -> None:
    """transformers keeps it as a buffer."""
    for more in ({}, {"decoder_vocab_size": 83, "share_encoder_decoder_embeddings": False}):
        config = hf.MarianConfig(**BART, **more)
        model = describe(config, "MarianMTModel").model
        assert isinstance(model.head, Language) and model.head.bias
        assert model.parameters() == count(hf.MarianMTModel, config, SINUSOIDS) + model.head.vocab
    with pytest.raises(ConfigError, match="decoder_vocab_size"):
        describe(hf.MarianConfig(**BART), "MarianMTModel", decoder_vocab_size=83)


def test_whisper_keys_have_no_bias() -> None:
    found = describe(hf.WhisperConfig(**WHISPER), "WhisperForConditionalGeneration")
    names = found.model.weights()
    biased = [name for name in names if ".key.bias" in name]
    assert biased == [] and found.context == 20
    assert "decoder.layers.0.cross.query.bias" in names
    assert found.model.encoder is not None and found.model.encoder.input.rows(100) == 50


def test_vit_counts_a_class_token_and_reads_it() -> None:
    found = describe(hf.ViTConfig(), "ViTForImageClassification")
    assert found.context == 197
    assert isinstance(found.model.head, SequenceClass) and found.model.head.pool == Pool("first")
    odd = describe(hf.ViTConfig(**VISION | {"image_size": [36, 29]}, qkv_bias=False), "ViTModel")
    assert odd.context == 1 + 5 * 4
    assert self_attention(odd.model.encoder, 0).projections.bias == "o"


# --- the whole --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_description_goes_to_json_and_back(name: str) -> None:
    from qkv.spec import from_json, to_json

    config, kind, _ = CASES[name]
    model = describe(config, kind.__name__).model
    assert isinstance(model, Model) and from_json(to_json(model)) == model
