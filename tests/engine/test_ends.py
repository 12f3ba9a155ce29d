"""What ends a text, through files; and what a batch does with a row that has ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import qkv
from qkv.engine import scheduler
from qkv.model import Model
from qkv.nn import Transformer
from qkv.spec import (
    Dense,
    DynamicNTK,
    Language,
    LayerNorm,
    Learned,
    Model as Spec,
    Rotary,
    Stack,
    Tokens,
    pre_norm,
)
from tests.engine.tiny import CLOSE, END, VOCAB, save_llama, says, tiny, word
from tests.matrix.variants import attention


def test_ends_are_those_of_the_configuration_and_of_the_tokenizer(tmp_path: Path) -> None:
    """Case G8: config.json names 7; the tokenizer names END, and its template closes turns with CLOSE."""
    save_llama(tmp_path, eos_token_id=7)
    model = qkv.load(tmp_path)
    assert {7, CLOSE} <= model.loaded.eos_ids
    assert model.tokenizer is not None and model.tokenizer.eos_ids <= model.loaded.eos_ids
    for end in (7, CLOSE):
        with model.tap(says([word("AB"), end, word("DE")])):
            done = model.generate([5, 6], max_new_tokens=9)
        assert (done.tokens, done.finish_reason) == ([word("AB"), end], "stop")


def test_a_row_that_has_ended_is_in_no_further_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case G8: and its batch mate stands where it stood."""
    model, fed = tiny(), []
    forward = Transformer.forward

    def watched(self: Transformer, tokens: torch.Tensor, **arguments: Any) -> torch.Tensor:
        fed.append(arguments["cache"].extend(arguments["layout"]).positions.tolist())
        return forward(self, tokens, **arguments)

    monkeypatch.setattr(Transformer, "forward", watched)
    with model.tap(says([END], [word("AB"), word("DE"), END])):
        first, second = model.generate([[1, 2, 3], [4, 5]], max_new_tokens=9)
    assert (first.tokens, second.tokens) == ([END], [word("AB"), word("DE"), END])
    assert fed == [[[0, 1, 2], [-1, 0, 1]], [[2]], [[3]]]


def learned() -> Model:
    """A model whose positions are rows of a table."""
    layer = pre_norm(attention(position=None), Dense("gelu", 20), norm=LayerNorm())
    tokens = Tokens(VOCAB, 16, position=Learned(60))
    spec = Spec(decoder=Stack(tokens, (layer, layer), LayerNorm()), head=Language(VOCAB))
    return tiny(described=spec, seed=3)


def test_batch_mates_change_nothing_where_positions_are_a_table() -> None:
    """Case G15 with learned positions: padding must not be counted."""
    model, prompts = learned(), [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15]]
    together = model.generate(prompts, max_new_tokens=6, ignore_eos=True)
    for prompt, found in zip(prompts, together, strict=True):
        alone = model.generate(prompt, max_new_tokens=6, ignore_eos=True)
        assert found.tokens == alone.tokens
        assert found.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_a_prompt_in_parts_is_turned_for_its_whole_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamic NTK: the base follows from the length of the prompt, of which the first part knows nothing."""
    position = Rotary(100.0, scaling=DynamicNTK(2.0, 8))
    described = replace(
        tiny().spec,
        decoder=replace(
            tiny().spec.trunk, layers=(pre_norm(attention(position=position), Dense("relu", 20)),) * 2
        ),
    )
    model = tiny(described=described)
    prompt = list(range(20, 50))
    shares = model(torch.tensor([prompt]))[0, -1].double().log_softmax(-1)
    monkeypatch.setattr(scheduler, "CHUNK", 7)
    done = model.generate(prompt, max_new_tokens=1)
    assert done.logprobs == pytest.approx([float(shares.max())], abs=1e-5)
