"""The twenty published models: parameters, active parameters and cache sizes, exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qkv.spec import (
    Attention,
    Causal,
    Experts,
    Gated,
    Language,
    LongRope,
    Mask,
    Model,
    MultiToken,
    Window,
)
from tests.spec import descriptions as of

# --- the twenty published models --------------------------------------------------------------


def llama_of(e: dict[str, Any]) -> Model:
    mask: Mask = Causal() & Window(e["win"]) if e["win"] else Causal()
    sizes = [e[name] for name in ("L", "h", "nh", "nkv", "hd", "ff", "V")]
    return of.llama(*sizes, theta=e["theta"], scaling=None, mask=mask, tie=e["tie"])


def gemma_of(e: dict[str, Any]) -> list[int]:
    return [e[name] for name in ("L", "h", "nh", "nkv", "hd", "ff", "V", "win")]


PUBLISHED: dict[str, Callable[[dict[str, Any]], Model]] = {
    "Llama-2-7B": llama_of,
    "Llama-2-70B": llama_of,
    "Llama-3-8B": llama_of,
    "Llama-3-70B": llama_of,
    "Llama-3.1-405B": llama_of,
    "Mistral-7B-v0.1": llama_of,
    "Mixtral-8x7B": lambda e: of.mixtral(
        e["L"], e["h"], e["nh"], e["nkv"], e["hd"], e["ff"], e["V"], e["experts"], e["top_k"]
    ),
    "Qwen2.5-7B": lambda e: of.qwen2(e["L"], e["h"], e["nh"], e["nkv"], e["hd"], e["ff"], e["V"]),
    "Qwen3-8B": lambda e: of.qwen3(
        e["L"], e["h"], e["nh"], e["nkv"], e["hd"], e["V"], Gated("silu", e["ff"])
    ),
    "Qwen3-30B-A3B": lambda e: of.qwen3(
        e["L"],
        e["h"],
        e["nh"],
        e["nkv"],
        e["hd"],
        e["V"],
        Experts(e["experts"], e["top_k"], Gated("silu", e["moe_ff"])),
    ),
    "Gemma-2-9B": lambda e: of.gemma2(*gemma_of(e)),
    "Gemma-3-27B": lambda e: of.gemma3(*gemma_of(e)),
    "DeepSeek-V3": lambda e: of.deepseek_v3(
        e["L"],
        e["h"],
        e["nh"],
        e["nope_hd"],
        e["rope_hd"],
        e["v_hd"],
        e["kv_lora"],
        e["q_lora"],
        e["ff"],
        e["moe_ff"],
        e["experts"],
        e["shared"],
        e["top_k"],
        dense_layers=e["first_dense"],
        vocab=e["V"],
    ),
    "BLOOM-176B": lambda e: of.bloom(e["L"], e["h"], e["nh"], e["V"]),
    "MPT-7B": lambda e: of.mpt(e["L"], e["h"], e["nh"], e["V"]),
    "T5-large": lambda e: of.t5(e["L_enc"], e["L_dec"], e["h"], e["nh"], e["hd"], e["ff"], e["V"]),
    "BERT-base-uncased": lambda e: of.bert(e["L"], e["h"], e["nh"], e["ff"], e["V"]),
    "GPT-2": lambda e: of.gpt2(e["L"], e["h"], e["nh"], e["V"], e["mpe"]),
    "Phi-3-mini-128k": lambda e: of.phi3(
        e["L"],
        e["h"],
        e["nh"],
        e["nkv"],
        e["ff"],
        e["V"],
        LongRope((1.0,) * 48, (2.0,) * 48, e["orig"], 32.0),
    ),
    "gpt-oss-20b": lambda e: of.gpt_oss(
        e["L"],
        e["h"],
        e["nh"],
        e["nkv"],
        e["hd"],
        e["moe_ff"],
        e["experts"],
        e["top_k"],
        e["V"],
        e["win"],
    ),
}


@pytest.fixture
def published(shared_folder: Path) -> dict[str, dict[str, Any]]:
    entries = json.loads((shared_folder / "configs" / "reference_models.json").read_text())
    del entries["_doc"]
    assert entries.keys() == PUBLISHED.keys()
    return entries


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameters_and_cache(name: str, published: dict[str, dict[str, Any]]) -> None:
    entry = published[name]
    model = PUBLISHED[name](entry)
    totals = [entry[k] for k in ("params", "params_main", "params_text", "params_with_pooler") if k in entry]
    assert [model.parameters()] == totals
    kept = [entry[k] for k in ("kv_elems", "kv_elems_mla", "kv_elems_self_decoder") if k in entry]
    assert [model.cache_bytes(1)] == [2 * values for values in kept]
    if "active" in entry:
        assert model.parameters(active=True) == entry["active"]


def test_published_counts_under_other_conventions(published: dict[str, dict[str, Any]]) -> None:
    def of_(name: str) -> tuple[Model, dict[str, Any]]:
        return PUBLISHED[name](published[name]), published[name]

    model, entry = of_("gpt-oss-20b")
    assert model.parameters(active=True, embedding=False) == entry["active_ex_input_embed"]
    assert 32 * model.cache_bytes(8192) == entry["kv_bytes_8192x32_windowed_bf16"]
    model, entry = of_("Gemma-2-9B")
    assert model.cache_bytes(8192) == entry["kv_bytes_at_8192_windowed_bf16"]
    model, entry = of_("Gemma-3-27B")
    assert model.cache_bytes(131072) == entry["kv_bytes_at_131072_windowed_bf16"]
    seeing = replace(model, towers=(of.gemma3_vision(entry["h"]),))
    assert seeing.parameters() == entry["params_total_with_vision"]
    model, entry = of_("T5-large")
    assert model.cache_bytes(0, source=1) == 2 * entry["kv_elems_cross_per_source_token"]
    _, entry = of_("DeepSeek-V3")
    expanded = Attention(
        entry["nh"], entry["nh"], entry["nope_hd"] + entry["rope_hd"], value_dim=entry["v_hd"]
    )
    assert 2 * entry["L"] * expanded.cache_values(1, 0) == 2 * entry["kv_elems_expanded_hf"]


def test_the_routing_biases_of_deepseek_count() -> None:
    """671,026,419,200 with 256 values in each of 58 layers that transformers keeps as buffers."""
    model = of.deepseek_v3()
    biases = [t.size for name, t in model.weights().items() if name.endswith("router.balance")]
    assert biases == [256] * 58 and sum(biases) == 14_848
    assert model.parameters() == 671_026_419_200


def test_an_input_table_the_head_multiplies_by_always_counts() -> None:
    """`embedding=False` leaves out a table that is only looked up."""
    assert of.gpt2().parameters(embedding=False) == of.gpt2().parameters()
    untied = of.llama()
    assert untied.parameters() - untied.parameters(embedding=False) == 128256 * 4096
    assert of.bert().parameters() - of.bert().parameters(embedding=False) == 30522 * 768


def test_a_second_token_adds_a_layer_a_join_and_three_norms() -> None:
    """DeepSeek-V3 predicts one more: 11.6 billion parameters; table and head are the first token's."""
    model = of.deepseek_v3()
    assert model.decoder is not None and isinstance(model.head, Language)
    further = model.decoder.layers[-1]
    more = replace(model, head=MultiToken(model.head, (further,))).parameters() - model.parameters()
    attention = 7168 * 1536 + 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 + 512 * 128 * 256 + 128 * 128 * 7168
    experts = 257 * 3 * 7168 * 2048 + 256 * 7168 + 256
    assert more == attention + experts + 2 * 7168 + 2 * 7168 * 7168 + 3 * 7168
    assert round(more / 1e9, 1) == 11.6
