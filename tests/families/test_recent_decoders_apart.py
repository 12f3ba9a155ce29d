"""What sets Mixtral, Qwen, Gemma, DeepSeek, gpt-oss and Llama 4 apart from their kin."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf

from qkv.spec import (
    Causal,
    Chunk,
    ClampedSwish,
    Everything,
    Experts,
    Gated,
    GatedDelta,
    Interpolation,
    Language,
    Llama3,
    LogScale,
    Pool,
    RMSNorm,
    Rotary,
    Router,
    SequenceClass,
    Span,
    TokenClass,
    Window,
    Yarn,
    arrangement,
)
from tests.families.recent_decoders import (
    CASES,
    GEMMA2_9B,
    GEMMA3_27B,
    QWEN25_7B,
    attentions,
    feed_forwards,
    latent,
    older,
    published,
    read,
    refused,
    small,
    windows,
    written,
)

# what sets each family apart


def test_mixtral_has_no_window_unless_it_says_so() -> None:
    assert windows(small("mixtral")) == []
    found = small("mixtral, small")
    assert windows(found) == [0, 1, 2, 3, 4]
    assert feed_forwards(found)[0] == Experts(5, 3, Gated("silu", 52), Router())
    assert attentions(small("mixtral"))[0].position == Rotary(1e6)


def test_qwen2_windows_begin_where_the_file_says_and_only_if_switched_on() -> None:
    assert windows(small("qwen2, small")) == [3, 4]
    assert windows(small("qwen2, small", layer_types=None)) == [3, 4]
    off = {"layer_types": None, "use_sliding_window": False}
    assert windows(small("qwen2, small", **off)) == []
    assert windows(read({**QWEN25_7B, "use_sliding_window": True})) == []  # longer than the context
    assert "gives no window, and some layers call for one" in refused(
        {**written(CASES["qwen2, small"]()), "use_sliding_window": False}
    )
    attention = attentions(small("qwen2, small"))[0]
    assert attention.projections.bias == "qkv" and attention.projections.norm is None


def test_yarn_multiplies_what_qwen_calls_its_context() -> None:
    assert read(QWEN25_7B).context == 32_768
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    found = read({**QWEN25_7B, "rope_scaling": yarn})
    assert found.context == 131_072
    assert attentions(found)[0].position == Rotary(1e6, scaling=Yarn(4.0, 32768))
    assert "more positions than can be counted" in refused(
        {**QWEN25_7B, "rope_scaling": {**yarn, "factor": 1e30}}
    )


def test_qwen2_moe_windows_are_every_other_one_below_a_limit() -> None:
    found = small("qwen2_moe, small")
    assert windows(found) == [0, 2] == windows(small("qwen2_moe, small", layer_types=None))
    dense, routed = feed_forwards(found)[:2]
    assert dense == Gated("silu", 52) and feed_forwards(found)[3] == routed
    assert routed == Experts(
        5, 2, Gated("silu", 14), Router(normalise=True), shared_expert=Gated("silu", 17), shared_gate=True
    )
    assert feed_forwards(small("qwen2_moe"))[0].router == Router(normalise=False)
    assert attentions(small("qwen2_moe"))[0].projections.bias == "qkv"
    assert attentions(found)[0].projections.bias == ""


def test_qwen3_normalises_each_head() -> None:
    found = small("qwen3, small", rms_norm_eps=1e-5)
    projections = attentions(found)[0].projections
    assert (projections.bias, projections.norm, projections.norm_over) == ("qkvo", RMSNorm(1e-5), "head")
    assert not projections.norm_after_rotation
    assert windows(found) == [2, 3, 4]
    assert attentions(small("qwen3"))[0].head_dim == 128


def test_qwen3_moe_has_windows_in_all_layers_and_experts_in_some(shared_folder: Path) -> None:
    found = small("qwen3_moe, small")
    assert windows(found) == [0, 1, 2, 3, 4]
    assert [isinstance(mixer, Experts) for mixer in feed_forwards(found)] == [False, True, True, False, True]
    large = published(shared_folder, "Qwen--Qwen3-235B-A22B")
    assert feed_forwards(large)[93] == Experts(128, 8, Gated("silu", 1536), Router())
    assert windows(large) == []


def test_qwen3_next_keeps_a_state_in_three_layers_of_four() -> None:
    found = small("qwen3_next, small")
    mixers = [layer.mixers()[0][1] for layer in found.model.trunk.layers]
    delta = GatedDelta(2, 6, 5, 7, convolution=3)
    assert mixers[:3] + mixers[4:] == [delta] * 4
    attention = attentions(found)[0]
    assert attention.position == Rotary(dims=4)
    assert attention.projections.gate == "sigmoid" and attention.projections.norm == RMSNorm(offset=1.0)
    assert arrangement(found.model.trunk.layers[0]) == (
        "pre_norm", {"norm": RMSNorm(offset=1.0), "scale": 1.0, "shared": None}
    )  # fmt: skip
    every = small("qwen3_next, small", layer_types=None, full_attention_interval=2)
    assert len(attentions(every)) == 2
    assert "attention_bias is True" in refused({**written(CASES["qwen3_next"]()), "attention_bias": True})


def test_gemma_says_gelu_and_means_the_tanh_form() -> None:
    for change in ({"hidden_act": "gelu"}, {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}):
        assert feed_forwards(small("gemma, small", **change))[0] == Gated("gelu_tanh", 52)
    found = small("gemma, small")
    assert found.model.trunk.input.scale == 6.0  # type: ignore[union-attr]
    assert found.model.trunk.norm == RMSNorm(offset=1.0)
    assert arrangement(found.model.trunk.layers[0])[0] == "pre_norm"  # type: ignore[index]
    assert isinstance(found.model.head, Language) and found.model.head.shared is None


def test_gemma2_caps_and_looks_near_in_even_layers() -> None:
    found = read(GEMMA2_9B)
    assert windows(found) == list(range(0, 42, 2))
    assert attentions(found)[0].mask == Causal() & Window(4096)
    score = attentions(found)[0].score
    assert (score.scale, score.cap) == (256**-0.5, 50.0)  # type: ignore[union-attr]
    assert isinstance(found.model.head, Language) and found.model.head.cap == 30.0
    assert arrangement(found.model.trunk.layers[0])[0] == "sandwich"  # type: ignore[index]
    changed = small("gemma2, small")
    score = attentions(changed)[0].score
    assert (score.scale, score.cap) == (5**-0.5, 20.0)  # type: ignore[union-attr]
    assert isinstance(changed.model.head, Language) and changed.model.head.cap is None


def test_gemma3_has_two_bases_and_scales_one() -> None:
    """The 5:1 pattern and both bases are in no file of the first release."""
    found = read(GEMMA3_27B)
    everywhere = [i for i in range(62) if i not in windows(found)]
    assert everywhere == [5, 11, 17, 23, 29, 35, 41, 47, 53, 59]
    near, far = attentions(found)[0], attentions(found)[5]
    assert near.position == Rotary(1e4) and near.mask == Causal() & Window(1024)
    assert far.position == Rotary(1e6, scaling=Interpolation(8.0))
    assert near.score.scale == far.score.scale == 168**-0.5  # type: ignore[union-attr]
    assert near.projections.norm == RMSNorm(offset=1.0)
    assert found.context == 131_072
    assert windows(small("gemma3_text, small")) == [0, 2, 4]
    assert windows(small("gemma3_text, small", layer_types=None, sliding_window_pattern=3)) == [0, 1, 3, 4]


def test_gemma3_sees_through_siglip() -> None:
    (tower,) = read(GEMMA3_27B).model.towers
    assert tower.projector is not None and tower.projector.pool == 16
    assert tower.projector.norm == RMSNorm(1e-6, offset=1.0)
    assert tower.stack.input.rows(0) == 4096 and tower.take_layer == -1
    assert tower.join.token == 262_144  # type: ignore[union-attr]
    assert read({**GEMMA3_27B, "architectures": ["Gemma3Model"]}).model.head is None
    pooled = {**GEMMA3_27B, "vision_config": {**GEMMA3_27B["vision_config"], "vision_use_head": True}}  # type: ignore[dict-item]
    assert read(pooled) == read(GEMMA3_27B)
    assert "do not average" in refused({**GEMMA3_27B, "mm_tokens_per_image": 250})
    assert "only siglip_vision_model is known" in refused(
        {**GEMMA3_27B, "vision_config": {"model_type": "vit"}}
    )


def test_gemma3_both_ways_is_an_encoder_with_half_the_window_to_either_side() -> None:
    found = small("gemma3_text, both ways")
    assert found.model.decoder is None and found.model.head is None
    near = {attention.mask for attention in attentions(found)}
    assert near == {Window(5, 4)}  # transformers: a distance below 8 // 2 + 1
    deep = small("gemma3_text, both ways", num_hidden_layers=6, layer_types=None)
    assert attentions(deep)[5].mask == Everything()


def test_deepseek_v3_scales_all_and_rotates_neighbours(shared_folder: Path) -> None:
    found = published(shared_folder, "deepseek-ai--DeepSeek-V3")
    mixer = latent(found)
    assert mixer.score.scale == pytest.approx(0.1352338, abs=1e-7)
    assert mixer.position == Rotary(
        pairs="interleaved", scaling=Yarn(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    )
    assert found.irrelevant == ("model.layers.61.*",)
    routed = feed_forwards(found)
    assert routed[2] == Gated("silu", 18432)
    assert routed[3] == Experts(
        256,
        8,
        Gated("silu", 2048),
        Router("sigmoid", scale=2.5, balance=True, groups=8, top_groups=4),
        shared_expert=Gated("silu", 2048),
    )
    changed = latent(small("deepseek_v3, small"))
    assert isinstance(changed.position, Rotary) and changed.position.pairs == "half"
    assert changed.norm == RMSNorm(1e-6) and changed.bias == "ao"  # whatever rms_norm_eps is


def test_deepseek_v2_weighs_by_softmax_and_ranks_groups_by_their_best() -> None:
    found = small("deepseek_v2, small")
    routed = feed_forwards(found)[1]
    assert routed.router == Router(
        "softmax", normalise=False, scale=16.0, groups=3, top_groups=2, group_best=1
    )
    assert routed.shared_expert == Gated("silu", 22, bias=True) and not routed.expert.bias
    assert latent(found).query_rank is None
    plain = feed_forwards(small("deepseek_v2, small", topk_method="greedy"))[1]
    assert plain.router == Router("softmax", normalise=False, scale=16.0)
    data = written(CASES["deepseek_v2, small"]())
    assert "norm_topk_prob is True" in refused({**data, "norm_topk_prob": True})
    assert "moe_layer_freq is 2" in refused({**data, "moe_layer_freq": 2})


def test_a_scale_that_is_not_finite_is_refused() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "mscale": 1e300, "mscale_all_dim": 1e300}
    data = older(written(CASES["deepseek_v3"]()))
    assert "gives no finite scale" in refused({**data, "rope_scaling": scaling})


def test_gpt_oss_has_sinks_a_clamp_and_a_window_in_even_layers(shared_folder: Path) -> None:
    found = published(shared_folder, "openai--gpt-oss-20b")
    near, far = attentions(found)[:2]
    assert near.score.sink and near.mask == Causal() & Window(128)  # type: ignore[union-attr]
    assert far.mask == Causal() and len(windows(found)) == 12
    assert near.position == Rotary(150_000.0, scaling=Yarn(32.0, 4096, truncate=False))
    assert near.projections.bias == "qkvo"
    expert = Gated(ClampedSwish(1.702, 7.0, 1.0), 2880, bias=True)
    assert feed_forwards(found)[0] == Experts(32, 4, expert, Router(bias=True))
    assert found.model.parameters(active=True, embedding=False) == 3_608_307_264
    assert feed_forwards(small("gpt_oss, small"))[0].expert.activation.limit == 5.0


def test_llama4_looks_around_or_far_and_scales_what_experts_read(shared_folder: Path) -> None:
    found = published(shared_folder, "meta-llama--Llama-4-Scout-17B-16E-Instruct")
    local, everywhere = attentions(found)[2:4]
    assert local.mask == Causal() & Chunk(8192) and everywhere.mask == Causal()
    assert local.position == Rotary(500_000.0, pairs="interleaved", scaling=Llama3(16.0, 1.0, 1.0, 8192))
    assert local.projections.norm == RMSNorm(1e-5, scale=False) and local.projections.norm_after_rotation
    assert everywhere.position is None and everywhere.projections.norm is None
    assert everywhere.score.query_scale == LogScale(8192, 0.1)  # type: ignore[union-attr]
    assert local.score.query_scale is None  # type: ignore[union-attr]
    assert feed_forwards(found)[0].router == Router("sigmoid", normalise=False, scales="input")
    assert isinstance(found.model.head, Language) and found.model.towers == ()
    with torch.device("meta"):
        text = hf.Llama4ForCausalLM(hf.Llama4TextConfig())
    assert found.model.parameters() == sum(parameter.numel() for parameter in text.parameters())


def test_llama4_lists_decide() -> None:
    found = small("llama4_text, small")
    turning = [attention.position is not None for attention in attentions(found)]
    assert turning == [True, False, True, True, False]
    assert windows(found) == [0, 2, 3]
    assert {attention.projections.norm for attention in attentions(found)} == {None}
    dense = [isinstance(mixer, Gated) for mixer in feed_forwards(found)]
    assert dense == [True, False, True, False, True] and feed_forwards(found)[0].hidden == 44
    listed = feed_forwards(small("llama4_text, small", moe_layers=[4]))
    assert [isinstance(mixer, Experts) for mixer in listed] == [False, False, False, False, True]
    still = attentions(small("llama4_text, small", attn_temperature_tuning=False))[1]
    assert still.score.query_scale is None  # type: ignore[union-attr]
    assert attentions(small("llama4_text, small", attn_temperature_tuning=4))[1] == attentions(found)[1]


def test_heads_follow_the_architecture() -> None:
    assert small("qwen2, classes").model.head == SequenceClass(5, Pool("last"), bias=False)
    assert small("qwen3, tokens").model.head == TokenClass(2)
    assert small("qwen3_moe, answers").model.head == Span()
    assert small("mixtral", architectures=["MixtralModel"]).model.head is None
    assert "names 'MixtralForDivination'" in refused(
        {**written(CASES["mixtral"]()), "architectures": ["MixtralForDivination"]}
    )


def test_what_does_not_fit_together_is_refused() -> None:
    data = written(CASES["mixtral, small"]())
    assert "there are only 5 experts" in refused({**data, "num_experts_per_tok": 6})
    assert "is no multiple of num_key_value_heads" in refused({**data, "num_key_value_heads": 4})
    data = written(CASES["qwen3_next, small"]())
    assert "is no multiple of linear_num_key_heads" in refused({**data, "linear_num_key_heads": 4})
    data = written(CASES["deepseek_v3, small"]())
    assert "do not fit together" in refused({**data, "topk_group": 4})
    data = written(CASES["llama4_text, small"]())
    assert "attention_chunk_size is missing" in refused({**data, "attention_chunk_size": None})
