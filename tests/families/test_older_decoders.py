"""GPT-2 to GLM-4: what their configurations say, counted against transformers on the meta device."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
import transformers as hf

from qkv.errors import ConfigError
from qkv.families import gpt2
from qkv.families.family import Description
from qkv.spec import (
    Alibi,
    Attention,
    Causal,
    Dense,
    Experts,
    Gated,
    Interpolation,
    Language,
    LayerNorm,
    Learned,
    LongRope,
    Projections,
    RMSNorm,
    Rotary,
    Router,
    Score,
    Tokens,
    Window,
    Yarn,
    arrangement,
)
from tests.families.older_decoders import (
    CASES,
    DEFAULTS,
    FAMILIES,
    HALVES,
    PUBLISHED,
    SMALL,
    read,
    sizes,
)
from tests.spec import descriptions as of
from tests.support import shared


def test_every_type_is_here() -> None:
    assert set(FAMILIES) == {case.config.model_type for case in CASES.values()}


@pytest.mark.parametrize("name", CASES)
def test_parameters_equal_transformers(name: str) -> None:
    case = CASES[name]
    found = read(case.file())
    assert found.model.parameters() == case.counted()
    assert isinstance(found.model.head, Language)


@pytest.mark.parametrize("config", DEFAULTS, ids=lambda config: config.model_type)
def test_the_bare_model_has_no_head(config: Any) -> None:
    case = next(case for name, case in SMALL.items() if case.config is config and "350m" not in name)
    names = ("ForCausalLM", "LMHeadModel")
    bare = next(case.model.__name__.removesuffix(end) for end in names if case.model.__name__.endswith(end))
    bare_case = case._replace(model=getattr(hf, f"{bare}Model"))
    found = read(bare_case.file())
    assert found.model.head is None
    assert found.model.parameters() == bare_case.counted()


@pytest.mark.parametrize("name", [name for name, case in SMALL.items() if "rope_parameters" in case.file()])
def test_the_older_spelling_says_the_same(name: str) -> None:
    """rope_theta, rope_scaling, partial_rotary_factor; GPT-NeoX: rotary_emb_base and rotary_pct."""
    file = SMALL[name].file()
    newer = {**file["rope_parameters"], "rope_theta": 12_345.0}
    older = {key: value for key, value in file.items() if key != "rope_parameters"}
    fraction = newer.get("partial_rotary_factor", 1.0)
    neox = file["model_type"] == "gpt_neox"
    older |= {"rotary_emb_base" if neox else "rope_theta": 12_345.0, "rope_scaling": None}
    if "partial_rotary_factor" in newer:
        older["rotary_pct" if neox else "partial_rotary_factor"] = fraction
    assert read({**file, "rope_parameters": newer}) == read(older)
    assert any(position.theta == 12_345.0 for position in rotations(read(older)))
    if file["model_type"] == "phi3":
        return  # knows no other scaling than LongRoPE
    scaled = read({**older, "rope_scaling": {"type": "linear", "factor": 4.0}})
    assert scaled == read({**file, "rope_parameters": {**newer, "rope_type": "linear", "factor": 4.0}})
    assert {position.scaling for position in rotations(scaled)} == {Interpolation(4.0)}


@pytest.mark.parametrize("name", SMALL)
def test_a_key_nobody_knows_is_named(name: str) -> None:
    file = SMALL[name].file()
    with pytest.raises(ConfigError, match="wobble"):
        read({**file, "wobble": 3})
    assert read({**file, "wobble": 3}, ignore=("wobble",)) == read(file)


@pytest.mark.parametrize("name", SMALL)
def test_a_head_that_is_not_known_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match="XForMaskedLM"):
        read({**SMALL[name].file(), "architectures": ["XForMaskedLM"]})


OTHER_HEADS = [
    (name, getattr(hf, f"{case.config.__name__.removesuffix('Config')}{head}"))
    for name, case in SMALL.items()
    for head in ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
    if hasattr(hf, f"{case.config.__name__.removesuffix('Config')}{head}") and "350m" not in name
]


@pytest.mark.parametrize(("name", "model"), OTHER_HEADS, ids=lambda value: getattr(value, "__name__", value))
def test_other_heads_equal_transformers(name: str, model: Any) -> None:
    """Reward models and the like: the last token's score without a bias, and what every token answers."""
    case = SMALL[name]._replace(model=model, changes={**SMALL[name].changes, "num_labels": 5})
    assert read(case.file()).model.parameters() == case.counted()


JUNK: tuple[Any, ...] = (None, -1, 0, 3.5, 10**30, 1e300, "x", True, [], [1], {}, {"rope_type": "yarn"})


@pytest.mark.parametrize("name", SMALL)
def test_nonsense_is_an_error_in_one_sentence(name: str) -> None:
    file = SMALL[name].file()
    for key in file:
        for value in JUNK:
            with contextlib.suppress(ConfigError):
                read({**file, key: value, "model_type": file["model_type"]})


# --- the numbers the world has ------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name: str) -> None:
    wanted = json.loads((shared() / "configs" / "reference_models.json").read_text())[name]
    model = read(PUBLISHED[name]).model
    assert model.parameters() == wanted["params"]
    assert model.cache_bytes(1) == 2 * wanted["kv_elems"]


@pytest.mark.parametrize(
    "name, described",
    [
        ("gpt2, as its class has it", of.gpt2()),
        ("gptj, as its class has it", of.gpt_j()),
        ("gpt_neox, as its class has it", of.gpt_neox()),
        ("opt, as its class has it", of.opt()),
        ("opt 350m", of.opt_350m()),
        ("mpt, as its class has it", of.mpt(24, 2048, 16, 50368)),
        ("falcon, as its class has it", of.falcon()),
        ("falcon 40b", of.falcon(60, 8192, 128, 8, norms=2)),
        ("phi3, as its class has it", of.phi3()),
        ("cohere, as its class has it", of.cohere()),
    ],
)
def test_equal_to_what_was_written_by_hand(name: str, described: Any) -> None:
    found = read(CASES[name].file()).model
    assert found - untied_if(found, described) == ()


def untied_if(found: Any, described: Any) -> Any:
    """Tied or not is for the counts to say; here the parts are compared."""
    shared = found.head.shared
    tokens = replace(described.decoder.input, shared=shared)
    return replace(
        described,
        decoder=replace(described.decoder, input=tokens),
        head=replace(described.head, shared=shared),
    )


# --- what a wrong reading would miss ------------------------------------------------------------


def attentions(found: Description) -> list[Attention]:
    assert found.model.decoder is not None
    return [mixer for mixer in found.model.decoder.mixers() if isinstance(mixer, Attention)]


def rotations(found: Description) -> list[Rotary]:
    return [a.position for a in attentions(found) if isinstance(a.position, Rotary)]


def feed_forward(found: Description) -> Any:
    assert found.model.decoder is not None
    return found.model.decoder.layers[0].mixers()[-1][1]


def arranged(found: Description) -> tuple[str, dict[str, object]]:
    assert found.model.decoder is not None
    named = arrangement(found.model.decoder.layers[0])
    assert named is not None
    return named


def small(name: str, **changes: Any) -> Description:
    return read({**SMALL[name].file(), **changes})


def test_gpt2_scales_scores_by_the_layer_where_asked() -> None:
    assert {a.score for a in attentions(small("gpt2"))} == {Score()}
    by_layer = small("gpt2", scale_attn_by_inverse_layer_idx=True)
    assert [a.score.scale for a in attentions(by_layer)] == [7**-0.5, 7**-0.5 / 2, 7**-0.5 / 3]
    assert {a.score for a in attentions(small("gpt2", scale_attn_weights=False))} == {Score(1.0)}
    both = small("gpt2", scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True)
    assert [a.score.scale for a in attentions(both)] == [1.0, 1 / 2, 1 / 3]


def test_gpt2_positions_end_with_the_table() -> None:
    found = small("gpt2")
    assert found.model.decoder is not None and isinstance(found.model.decoder.input, Tokens)
    assert found.model.decoder.input.position == Learned(30) and found.context == 30
    assert feed_forward(found) == Dense("gelu_tanh", 41)
    with pytest.raises(ConfigError, match="add_cross_attention"):
        small("gpt2", add_cross_attention=True)


def test_gpt2_reads_the_names_others_use_and_refuses_two_that_differ() -> None:
    file = SMALL["gpt2"].file()
    other = {key: value for key, value in file.items() if key not in gpt2.NAMES}
    other |= {gpt2.NAMES[key]: file[key] for key in gpt2.NAMES}
    assert read(other) == read(file)
    with pytest.raises(ConfigError, match="n_embd is 35 and hidden_size is 40"):
        read({**file, "hidden_size": 40})
    with pytest.raises(ConfigError, match="n_embd 35 is no multiple of n_head 6"):
        read({**file, "n_head": 6})


def test_gptj_turns_neighbours_behind_one_norm() -> None:
    found = small("gptj")
    assert set(rotations(found)) == {Rotary(dims=4, pairs="interleaved")}
    assert arranged(found) == ("parallel", {"norm": LayerNorm(), "shared": None})
    assert isinstance(found.model.head, Language) and found.model.head.bias
    assert attentions(found)[0].projections == Projections()
    file = SMALL["gptj"].file()
    del file["rotary_dim"]
    with pytest.raises(ConfigError, match="64"):
        read(file)  # the class has 64
    with pytest.raises(ConfigError, match="rope_theta"):
        small("gptj", rope_theta=5e5)


def test_gpt_neox_has_two_norms_side_by_side_and_turns_a_quarter() -> None:
    found = read({**sizes(num_attention_heads=1, hidden_size=40), "model_type": "gpt_neox"})
    assert rotations(found)[0].dims == 10
    assert arranged(found)[0] == "parallel" and arranged(found)[1]["norms"] == 2
    with pytest.raises(ConfigError, match="9 of the 36"):
        read({**sizes(num_attention_heads=1), "model_type": "gpt_neox"})
    assert rotations(small("gpt_neox"))[0].dims == 6
    assert arranged(small("gpt_neox"))[0] == "pre_norm"
    assert feed_forward(small("gpt_neox", hidden_act="gelu_fast")) == Dense("gelu_tanh", 52)
    with pytest.raises(ConfigError, match=r"rotary_pct is 0\.5 and partial_rotary_factor is 0\.25"):
        small("gpt_neox", rotary_pct=0.5, partial_rotary_factor=0.25)


def test_opt_begins_at_the_third_row() -> None:
    found = small("opt")
    assert found.model.decoder is not None and isinstance(found.model.decoder.input, Tokens)
    assert found.model.decoder.input.position == Learned(32, offset=2) and found.context == 30
    assert feed_forward(found) == Dense("relu", 52, bias=False)


def test_opt_350m_is_post_norm_without_a_last_one() -> None:
    found = small("opt, 350m's shape")
    assert arranged(found)[0] == "post_norm"
    assert found.model.decoder is not None and found.model.decoder.norm is None
    file = SMALL["opt, 350m's shape"].file()
    with pytest.raises(ConfigError, match="word_embed_proj_dim 14"):
        read({**file, "architectures": ["OPTModel"]})


def test_bloom_has_alibi_and_promises_only_what_its_file_says() -> None:
    found = small("bloom")
    assert {a.position for a in attentions(found)} == {Alibi(8.0)}
    assert found.model.decoder is not None and isinstance(found.model.decoder.input, Tokens)
    assert found.model.decoder.input.norm == LayerNorm()
    assert found.context is None and read(PUBLISHED["BLOOM-176B"]).context == 2048
    with pytest.raises(ConfigError, match="apply_residual_connection_post_layernorm"):
        small("bloom", apply_residual_connection_post_layernorm=True)


def test_mpt_follows_its_slopes_clip_and_scale() -> None:
    file = SMALL["mpt"].file()
    file["attn_config"]["alibi_bias_max"] = 16
    attention = attentions(read(file))[0]
    assert attention.position == Alibi(16.0) and attention.projections == Projections(clip=6.0)
    assert attention.score == Score(0.3) and read(file).context == 40
    assert arranged(read(file))[1]["norm"] == LayerNorm(bias=False)
    for key, value in {
        "alibi": False,
        "prefix_lm": True,
        "qk_ln": True,
        "attn_type": "multiquery_attention",
    }.items():
        with pytest.raises(ConfigError, match=f"attn_config: {key}"):
            read({**file, "attn_config": {**file["attn_config"], key: value}})
    with pytest.raises(ConfigError, match="no_bias"):
        read({**file, "no_bias": False})
    with pytest.raises(ConfigError, match="logit_scale"):
        read({**file, "logit_scale": 0.5})
    with pytest.raises(ConfigError, match="attn_config: wobble"):
        read({**file, "attn_config": {**file["attn_config"], "wobble": 1}})


def test_falcons_shapes() -> None:
    shapes = {
        name: (attentions(small(f"falcon, {name}"))[0].kv_heads, *arranged(small(f"falcon, {name}")))
        for name in ("7b's shape, after one another", "many heads", "40b's shape", "11b's shape")
    }
    parallel = {"norm": LayerNorm(), "shared": None}
    assert shapes == {
        "7b's shape, after one another": (1, "pre_norm", {"norm": LayerNorm(), "scale": 1.0, "shared": None}),
        "many heads": (6, "parallel", parallel),
        "40b's shape": (2, "parallel", {**parallel, "norms": 2}),
        "11b's shape": (3, "parallel", parallel),
    }


def test_falcons_own_alibi_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"config\.json: alibi is True"):
        small("falcon, many heads", alibi=True)


def test_phi_shares_one_norm_and_turns_part_of_a_head() -> None:
    found = small("phi, normalised")
    assert arranged(found)[0] == "parallel" and "norms" not in arranged(found)[1]
    assert rotations(found)[0].dims == 4 and rotations(small("phi"))[0].dims is not None
    assert attentions(found)[0].projections == Projections(bias="qkvo", norm=LayerNorm())
    assert isinstance(found.model.head, Language) and found.model.head.bias
    assert feed_forward(found) == Dense("gelu_tanh", 52)


def test_phi3_windows_over_the_context_are_none() -> None:
    assert attentions(small("phi3"))[0].mask == Causal() & Window(7)
    long = read(PUBLISHED["Phi-3-mini-128k"])
    assert attentions(long)[0].mask == Causal() and long.context == 131_072
    assert attentions(read({**PUBLISHED["Phi-3-mini-128k"], "sliding_window": 2047}))[0].mask.reach == 2047


def test_phi3s_scaling_is_longrope_by_any_name() -> None:
    file = PUBLISHED["Phi-3-mini-128k"]
    scaling = rotations(read(file))[0].scaling
    assert isinstance(scaling, LongRope)
    assert (scaling.original, scaling.factor, scaling.short) == (4096, 32.0, tuple(HALVES))
    for name in ("su", "yarn"):
        assert read({**file, "rope_scaling": {**file["rope_scaling"], "type": name}}) == read(file)
    config = hf.Phi3Config(**{k: v for k, v in file.items() if k not in ("model_type", "architectures")})
    newer = {**json.loads(json.dumps(config.to_dict())), "architectures": ["Phi3ForCausalLM"]}
    assert read(newer).model == read(file).model


def test_stablelm_has_layer_norms_a_head_and_two_arrangements() -> None:
    found = small("stablelm")
    through = attentions(found)[0].projections
    assert through == Projections(bias="qkv", norm=LayerNorm(bias=False), norm_over="heads")
    assert rotations(found)[0].dims == 2 and arranged(found)[0] == "pre_norm"
    side_by_side = small("stablelm, parallel")
    assert arranged(side_by_side) == ("parallel", {"norm": LayerNorm(), "shared": None})
    assert feed_forward(side_by_side) == Gated("silu", 52)


def test_starcoder2_has_a_window_in_every_layer() -> None:
    assert {a.mask for a in attentions(small("starcoder2"))} == {Causal() & Window(7)}
    assert {a.mask for a in attentions(small("starcoder2, plain"))} == {Causal()}
    assert feed_forward(small("starcoder2")) == Dense("gelu_tanh", 52)
    published = {"activation_function": "gelu", "mlp_type": "default", "norm_type": "layer_norm"}
    assert small("starcoder2", **published) == small("starcoder2")


def test_cohere_scales_logits_and_turns_neighbours() -> None:
    found = small("cohere, biased")
    assert isinstance(found.model.head, Language) and found.model.head.scale == 0.8
    assert set(rotations(found)) == {Rotary(500_000.0, pairs="interleaved")}
    assert arranged(found) == ("parallel", {"norm": LayerNorm(bias=False), "shared": None})
    assert attentions(small("cohere"))[0].projections.norm_over == "heads"
    # Command R: 8192 to spare memory, 131,072 trained for
    assert small("cohere", max_position_embeddings=8192, model_max_length=131_072).context == 131_072


def test_cohere2_rotates_only_where_it_has_a_window() -> None:
    local, everywhere = Causal() & Window(7), Causal()
    file = SMALL["cohere2"].file()
    expected = [local, local, local, everywhere, local]
    for layer_types in (file.pop("layer_types"), None):
        found = attentions(read({**file, "layer_types": layer_types}))
        assert [a.mask for a in found] == expected
        assert [a.position is None for a in found] == [mask == everywhere for mask in expected]
    every_second = attentions(read({**file, "sliding_window_pattern": 2}))
    assert [a.mask == local for a in every_second] == [True, False, True, False, True]
    published = {
        "cache_implementation": "hybrid", "head_dim": 6, "layer_switch": 4, "rotary_pct": 1.0,
        "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj",
        "sliding_window_pattern": 4, "use_embedding_sharing": True, "use_gated_activation": True,
        "use_parallel_block": True, "use_parallel_embedding": True,
    }  # fmt: skip
    assert read({**file, **published}) == read(file)
    with pytest.raises(ConfigError, match="sliding_window is missing"):
        read({**file, "sliding_window": None})


def test_olmo_clips_and_its_norms_have_no_parameters() -> None:
    found = small("olmo")
    assert attentions(found)[0].projections == Projections(clip=8.0)
    assert arranged(found)[1]["norm"] == LayerNorm(1e-5, scale=False, bias=False)


def test_olmo2_normalises_afterwards_and_over_all_heads() -> None:
    found = small("olmo2")
    assert arranged(found)[:1] == ("reordered",)
    assert attentions(found)[0].projections == Projections(norm=RMSNorm(1e-5), norm_over="all")


def test_olmoe_weighs_by_the_softmax_over_all() -> None:
    assert feed_forward(small("olmoe")) == Experts(5, 3, Gated("silu", 52), Router(normalise=True))
    found = small("olmoe", norm_topk_prob=False)
    assert feed_forward(found).router == Router(normalise=False)
    assert arranged(found)[0] == "pre_norm" and attentions(found)[0].projections.norm_over == "all"
    with pytest.raises(ConfigError, match="clip_qkv"):
        small("olmoe", clip_qkv=8.0)


def test_glm4_has_norms_around_and_turns_neighbours_in_half_a_head() -> None:
    found = small("glm4")
    assert arranged(found) == ("sandwich", {"norm": RMSNorm(1.5625e-7), "shared": None})
    assert set(rotations(found)) == {Rotary(dims=6, pairs="interleaved")}
    assert attentions(found)[0].projections == Projections(bias="qkv")


def test_yarn_multiplies_the_context_and_other_scalings_do_not() -> None:
    yarn = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 30}
    found = small("olmo2", rope_parameters=yarn)
    assert isinstance(rotations(found)[0].scaling, Yarn) and found.context == 120
    linear = {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}
    assert small("olmo2", rope_parameters=linear).context == 30
