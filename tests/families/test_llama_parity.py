"""Llama and its kin equal transformers on random small models: full, padded, cached, chunked, gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from qkv import loading
from qkv.nn import ContiguousCache, Layout
from tests.support import assert_close

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.0, 2.0, 3.5, 8.0]}

# name: (model type, what differs from BASE)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "one-head": ("llama", {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 6}),
    "odd-heads": ("llama", {"hidden_size": 35, "num_attention_heads": 5, "num_key_value_heads": 5,
                            "head_dim": 4}),
    "nine-over-three": ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 4}),
    "multi-query": ("llama", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10}),
    "wide-heads": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}),
    # within 16 positions and, in the longer full passes, beyond them
    "dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
                          "max_position_embeddings": 16}),
    "yarn": ("llama", {"rope_scaling": YARN}),
    "yarn-attention": ("llama", {"rope_scaling": {**YARN, "attention_factor": 0.7, "beta_fast": 4.0}}),
    "yarn-mscale": ("llama", {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    "yarn-untruncated": ("llama", {"rope_scaling": {**YARN, "truncate": False}}),
    "llama3": ("llama", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 32}}),
    "longrope": ("llama", {"rope_scaling": {**LONG, "original_max_position_embeddings": 16, "factor": 2.0}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "window": ("mistral", {"sliding_window": 3}),
    "window-tied": ("mistral", {"sliding_window": 5, "tie_word_embeddings": True, "num_attention_heads": 3,
                                "num_key_value_heads": 3}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 0], "layer_types": None, "use_sliding_window": False}),
    "granite": ("granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.5,
                            "attention_multiplier": 0.2, "logits_scaling": 4.0}),
}  # fmt: skip


class Pair:
    """The oracle and our reading of what it saved."""

    def __init__(self, name: str, folder: Path):
        kind, changes = MODELS[name]
        settings = {**BASE, **changes}
        if kind == "granite":
            settings.pop("head_dim")  # transformers' Granite takes it from the width
        config = transformers.AutoConfig.for_model(kind, **settings)
        torch.manual_seed(3)
        self.theirs = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager"
        ).eval()
        with torch.no_grad():  # biases start at zero and norms at one: neither would be seen
            for parameter in self.theirs.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        self.theirs.save_pretrained(folder)
        self.loaded = loading.load(folder)
        self.ours = self.loaded.model


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp(request.param))


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("length", [1, 17, 40])
def test_full_pass(pair: Pair, length: int) -> None:
    ids = tokens(2, length)
    with torch.no_grad():
        assert_close(pair.ours(ids), pair.theirs(ids).logits)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded(pair: Pair, side: str) -> None:
    ids, present = tokens(3, 12), torch.ones(3, 12, dtype=torch.long)
    for row, missing in enumerate((0, 4, 7)):
        present[row, : missing if side == "left" else 0] = 0
        present[row, 12 - missing if side == "right" else 12 :] = 0
    positions = (present.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        theirs = pair.theirs(ids, attention_mask=present, position_ids=positions).logits
        ours = pair.ours(ids, layout=Layout.padded(present))
    there = present.bool()
    assert_close(ours[there], theirs[there])


@pytest.mark.parametrize("sizes", [[1] * 14, [5, 1, 8], [3, 3, 3, 3, 2], [7, 7]])
def test_in_pieces(pair: Pair, sizes: list[int]) -> None:
    ids = tokens(2, sum(sizes))
    with torch.no_grad():
        whole = pair.theirs(ids).logits
        cache = ContiguousCache(pair.ours.spec.trunk, 2, sum(sizes))
        pieces = [pair.ours(piece, cache=cache) for piece in ids.split(sizes, dim=1)]
    assert_close(torch.cat(pieces, 1), whole)


def test_gradients_of_one_layer(pair: Pair) -> None:
    """Of each parameter of the middle layer, for the same loss."""
    ids = tokens(2, 11)
    names = {theirs: ours for ours, theirs in _names(pair).items()}
    layer = [name for name in names if ".layers.1." in name]
    pair.ours.requires_grad_(True).zero_grad()
    pair.theirs.zero_grad()
    pair.ours(ids).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).mean().backward()
    pair.theirs(ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).mean().backward()
    assert len(layer) >= 9
    theirs = dict(pair.theirs.named_parameters())
    # measured against the layer's largest: a key bias hardly moves a softmax, its gradient is all rounding
    largest = max(float(theirs[name].grad.abs().max()) for name in layer)
    for name in layer:
        ours = pair.ours.get_parameter(names[name]).grad
        assert ours is not None, name
        assert float((ours - theirs[name].grad).abs().max()) <= 1e-5 * largest, name


def _names(pair: Pair) -> dict[str, str]:
    places = loading.weight_map(pair.loaded.description)
    return {ours: place.name for ours, [(_, _, place, _)] in places.ours.items()}


def test_parameters_are_those_of_the_description(pair: Pair) -> None:
    wanted = pair.ours.spec.weights()
    found = {name: tuple(p.shape) for name, p in pair.ours.named_parameters()}
    assert found == {name: tensor.shape for name, tensor in wanted.items()}
    assert pair.ours.spec.parameters() == pair.theirs.num_parameters()
