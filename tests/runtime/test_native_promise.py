"""The promise: batch mates, chunks, forks, truncation and threads change no bit of an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from qkv.runtime.built import NAME
from qkv.runtime.interpreter import Floats, Rows
from qkv.runtime.lower import lower
from qkv.runtime.native import CACHE_TYPES, CacheType, Native
from qkv.spec import (
    Attention,
    Causal,
    CrossAttention,
    Dense,
    Everything,
    Experts,
    Gated,
    Language,
    Layer,
    Model,
    RMSNorm,
    Rotary,
    Score,
    Stack,
    Tokens,
    Window,
    pre_norm,
)
from tests.runtime.native_models import SETS, needs_native, tokens, weights

pytestmark = needs_native
VOCAB, WIDTH = 37, 256  # rows of whole blocks, in every format
FORMATS = ("F32", "BF16", "Q4_1", "Q8_0", "Q6_K")
# of those a profile asks for: each of these runs a few dozen steps
EXAMPLES = max(8, settings().max_examples // 20)


def attention(heads: int = 4, kv_heads: int = 2, **parts: Any) -> Attention:
    return Attention(heads, kv_heads, WIDTH // heads, **{"position": Rotary(100.0), **parts})


def decoder(*layers: Layer) -> Model:
    return Model(decoder=Stack(Tokens(VOCAB, WIDTH), layers, RMSNorm()), head=Language(VOCAB))


def plain(mixer: Attention) -> Layer:
    return pre_norm(mixer, Gated("silu", WIDTH), norm=RMSNorm())


def reads_a_source() -> Model:
    encoder = pre_norm(attention(mask=Everything()), Dense("gelu", WIDTH), norm=RMSNorm())
    crossing = CrossAttention(4, 1, 64, WIDTH)
    layer = pre_norm(attention(), crossing, Dense("relu", WIDTH), norm=RMSNorm())
    stacks = (Stack(Tokens(VOCAB, WIDTH), (each,), RMSNorm()) for each in (encoder, layer))
    return Model(*stacks, head=Language(VOCAB))


MODELS = {
    "grouped": decoder(plain(attention()), plain(attention(8, 1))),
    "window": decoder(plain(attention(mask=Causal() & Window(21))), plain(attention())),
    "experts": decoder(
        *(pre_norm(attention(), Experts(5, 2, expert=Gated("silu", WIDTH)), norm=RMSNorm()),) * 2
    ),
    "sinks": decoder(*(plain(attention(score=Score(sink=True, cap=5.0))),) * 2),
    "encoder-decoder": reads_a_source(),
}


@cache
def native(name: str, format: str, cache_type: CacheType, set_: str) -> Native:
    return Native(lower(MODELS[name]), weights(MODELS[name], format, 0.1), 2, cache_type, set_)


@cache
def workers(count: int) -> Any:
    return import_module(NAME).Workers(count)


@dataclass
class Text:
    """A text and the answers it had alone, in one step; `got` are those it has had since."""

    tokens: list[int]
    source: list[int]
    alone: Floats
    got: list[Floats] = field(default_factory=list)


def read(machine: Native, source: list[int], sequence: int) -> None:
    machine.read(Rows.of(source, sequence=sequence, wanted=[]))


def by_itself(machine: Native, given: list[int], source: list[int]) -> Text:
    read(machine, source, 0)
    answers = machine.step(Rows.of(given))
    machine.forget(0)
    return Text(given, source, answers)


@dataclass
class Schedule:
    """Texts that go on by pieces of random length, in random order, until all are done."""

    machine: Native
    texts: dict[int, Text]
    random: Random

    def run(self) -> None:
        for sequence, text in self.texts.items():
            read(self.machine, text.source, sequence)
        while open_ := [s for s, text in self.texts.items() if len(text.got) < len(text.tokens)]:
            self._advance(self.random.sample(open_, self.random.randint(1, len(open_))))
            if self.random.random() < 0.3:
                self._disturb(self.random.choice(list(self.texts)))

    def _advance(self, chosen: list[int]) -> None:
        pieces = []
        for sequence in chosen:
            text = self.texts[sequence]
            start, left = len(text.got), len(text.tokens) - len(text.got)
            count = self.random.choice([1, self.random.randint(1, left), left])
            pieces.append(Rows.of(text.tokens[start : start + count], start, sequence))
        self.machine.workers = workers(self.random.randint(1, 4))
        answers = self.machine.step(Rows.together(*pieces))
        for piece in pieces:
            text = self.texts[int(piece.sequences[0])]
            text.got += list(answers[: len(piece.tokens)])
            answers = answers[len(piece.tokens) :]

    def _disturb(self, sequence: int) -> None:
        """A copy goes on beside the text, or the text goes back and is read again from there."""
        text = self.texts[sequence]
        if len(self.texts) < 6 and self.random.random() < 0.5:
            child = max(self.texts) + 1
            self.machine.fork(sequence, child)
            self.texts[child] = Text(text.tokens, text.source, text.alone, list(text.got))
        elif len(text.got) > 1:
            length = self.random.randint(1, len(text.got) - 1)
            self.machine.forget(sequence, length)
            del text.got[length:]


@pytest.mark.parametrize("set_", SETS)
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=EXAMPLES)
@given(
    st.sampled_from(FORMATS),
    st.sampled_from(CACHE_TYPES),
    st.lists(st.integers(1, 40) | st.just(150), min_size=1, max_size=3),
    st.integers(1, 35),
    st.integers(0, 2**32),
)
def test_answers_are_those_of_one_step_alone(
    name: str, set_: str, format: str, cache_type: CacheType, lengths: list[int], source: int, seed: int
) -> None:
    machine = native(name, format, cache_type, set_)
    machine.workers = workers(1 + seed % 4)
    texts = [
        by_itself(machine, tokens(count, VOCAB, seed + i), tokens(source + i, VOCAB, seed - i - 1 & 0xFFFF))
        for i, count in enumerate(lengths)
    ]
    schedule = Schedule(machine, dict(enumerate(texts)), Random(seed))
    try:
        schedule.run()
        for text in schedule.texts.values():
            assert np.array_equal(np.stack(text.got), text.alone)
    finally:
        for sequence in schedule.texts:
            machine.forget(sequence)
    for group in (*machine.own, *machine.beside):
        assert len(group.free) == len(group.holders)


@pytest.mark.parametrize("set_", SETS)
@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_forks_of_one_prompt_go_their_own_ways(cache_type: CacheType, set_: str) -> None:
    machine = native("grouped", "Q4_1", cache_type, set_)
    prompt = tokens(21, VOCAB, 5)
    texts = [by_itself(machine, prompt + tokens(30, VOCAB, seed), [1]) for seed in range(4)]
    machine.step(Rows.of(prompt, wanted=[]))
    for child in (1, 2, 3):
        machine.fork(0, child)
    for place in range(21, 51):
        rows = [Rows.of([text.tokens[place]], place, i) for i, text in enumerate(texts)]
        answers = machine.step(Rows.together(*rows))
        for i, text in enumerate(texts):
            assert np.array_equal(answers[i], text.alone[place])
    for sequence in range(4):
        machine.forget(sequence)
