"""Blocks of the cache: shared until one writes, cleared before they serve again, and none is ever lost."""

from __future__ import annotations

from collections import Counter
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from qkv.runtime.blocks import BLOCK, Pool, blocks
from qkv.runtime.built import NAME
from qkv.runtime.interpreter import Rows
from qkv.runtime.lower import lower
from qkv.runtime.native import Native
from tests.matrix.variants import ENCODER_DECODERS, VARIANTS, VOCAB
from tests.runtime.native_models import needs_native, tokens, weights


class Memory:
    """A cache of one number a token, which does what the native one does with its blocks."""

    def __init__(self) -> None:
        self.blocks = np.zeros((0, BLOCK))

    def reserve(self, group: int, count: int) -> None:
        more = np.zeros((max(0, count - len(self.blocks)), BLOCK))
        self.blocks = np.concatenate([self.blocks, more])

    def clear(self, group: int, block: int) -> None:
        self.blocks[block] = 0

    def copy(self, group: int, source: int, target: int) -> None:
        self.blocks[target] = self.blocks[source]


class Held:
    """Sequences of numbers kept through `Pool`, beside the plain lists they should be."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.blocks = Pool(self.memory, 0)
        self.lists: dict[int, list[int]] = {}
        self.written = 0

    def append(self, sequence: int, count: int) -> None:
        held = self.lists.setdefault(sequence, [])
        before = blocks(len(held))
        self.blocks.extend(sequence, len(held), len(held) + count)
        for block in self.blocks.table[sequence, before : blocks(len(held) + count)]:
            assert not self.memory.blocks[block].any(), "a block that is taken holds what another left"
        for _ in range(count):
            self.written += 1
            block = self.blocks.table[sequence, len(held) // BLOCK]
            self.memory.blocks[block, len(held) % BLOCK] = self.written
            held.append(self.written)

    def fork(self, parent: int, child: int) -> None:
        self.blocks.fork(parent, child)
        self.lists[child] = list(self.lists[parent])

    def forget(self, sequence: int, length: int) -> None:
        self.blocks.forget(sequence, length)
        del self.lists[sequence][length:]

    def check(self) -> None:
        held: Counter[int] = Counter()
        for sequence, numbers in self.lists.items():
            table = self.blocks.table[sequence, : blocks(len(numbers))].tolist()
            assert self.blocks.lengths[sequence] == len(numbers)
            assert self.memory.blocks[table].reshape(-1)[: len(numbers)].tolist() == numbers
            held.update(table)
        assert [held[block] for block in range(len(self.blocks.holders))] == self.blocks.holders
        assert sorted([*self.blocks.free, *held]) == list(range(len(self.memory.blocks)))


def test_a_fork_shares_all_blocks_and_copies_the_one_it_writes_to() -> None:
    held = Held()
    held.append(0, 40)
    held.fork(0, 1)
    assert held.blocks.table[1, :3].tolist() == held.blocks.table[0, :3].tolist() == [0, 1, 2]
    held.append(1, 1)
    assert held.blocks.table[1, :3].tolist() == [0, 1, 3]  # only the last had room
    assert held.blocks.holders == [2, 2, 1, 1]
    held.append(0, 9)
    assert held.blocks.table[0, :4].tolist() == [0, 1, 2, 4]  # nobody else holds it now
    held.check()


def test_truncation_gives_whole_blocks_back_and_keeps_the_one_it_cuts() -> None:
    held = Held()
    held.append(0, 50)
    held.forget(0, 17)
    assert held.blocks.free == [3, 2]
    held.forget(0, 60)  # no longer than it is
    held.append(0, 20)
    assert held.blocks.table[0, :3].tolist() == [0, 1, 2]
    held.forget(0, 0)
    held.check()
    assert sorted(held.blocks.free) == [0, 1, 2, 3]


def test_a_sequence_nobody_began_is_forgotten_without_a_word() -> None:
    held = Held()
    held.blocks.forget(1_000)
    assert not held.blocks.holders


@settings(max_examples=settings().max_examples // 2)
@given(st.data())
def test_whatever_is_done_every_sequence_reads_its_own_and_no_block_is_lost(data: st.DataObject) -> None:
    held = Held()
    for _ in range(data.draw(st.integers(1, 20))):
        known = [sequence for sequence, numbers in held.lists.items() if numbers]
        what = data.draw(st.sampled_from(["append", "fork", "forget"])) if known else "append"
        if what == "append":
            held.append(data.draw(st.integers(0, 9)), data.draw(st.integers(1, 70)))
        elif what == "fork":
            free = [sequence for sequence in range(12) if not held.lists.get(sequence)]
            if free:
                held.fork(data.draw(st.sampled_from(known)), data.draw(st.sampled_from(free)))
        else:
            sequence = data.draw(st.sampled_from(known))
            held.forget(sequence, data.draw(st.integers(0, len(held.lists[sequence]))))
        held.check()
    for sequence, numbers in held.lists.items():
        held.forget(sequence, 0)
        assert not numbers
    held.check()
    assert len(held.blocks.free) == len(held.blocks.holders)


@needs_native
@pytest.mark.parametrize("cache_type", ["f32", "bf16", "int8"])
def test_a_sequence_that_held_no_numbers_leaves_no_trace(cache_type: str) -> None:
    spec = VARIANTS["grouped"]
    given = dict(weights(spec))
    table = given["decoder.embedding.weight"].decode().copy()
    table[3] = np.nan
    given["decoder.embedding.weight"] = given["decoder.embedding.weight"].from_array("table", table)
    rows = [token for token in tokens(40, VOCAB) if token != 3]
    machine = Native(lower(spec), given, threads=1, cache_type=cache_type)  # type: ignore[arg-type]
    clean = machine.step(Rows.of(rows))
    machine.forget(0)
    assert np.isnan(machine.step(Rows.of([3] * 60, sequence=1))).all()
    machine.forget(1)
    assert np.array_equal(machine.step(Rows.of(rows, sequence=2)), clean)
    assert len(machine.own[0].holders) == 4  # the blocks were the same


# bytes of a head's keys and values in a block of 16 tokens: dimensions in steps of 4 and of 16, and for
# int8 a scale each for every token
@pytest.mark.parametrize(
    ("cache_type", "head"),
    [("f32", 4 * 16 * (8 + 16)), ("bf16", 2 * 16 * (8 + 16)), ("int8", 16 * (8 + 16) + 2 * 4 * 16)],
)
@needs_native
def test_the_bytes_of_a_sequence_are_those_of_whole_blocks(cache_type: str, head: int) -> None:
    spec = VARIANTS["grouped"]  # two layers of two heads of 6
    machine = Native(lower(spec), weights(spec), threads=1, cache_type=cache_type)  # type: ignore[arg-type]
    for count, held in ((0, 0), (1, 1), (16, 1), (17, 2), (300, 19)):
        assert machine.bytes_for(count) == held * 2 * 2 * head
    spec = ENCODER_DECODERS["encoder-decoder-pre-norm"]  # of a source, the encoder's own and what is read
    machine = Native(lower(spec), weights(spec), threads=1, cache_type=cache_type)  # type: ignore[arg-type]
    assert machine.bytes_for(17, 5) == (2 + 1 + 1) * 2 * 2 * head


@needs_native
def test_only_what_is_read_of_a_source_stays() -> None:
    spec = ENCODER_DECODERS["encoder-decoder-pre-norm"]
    machine = Native(lower(spec), weights(spec), threads=1)
    machine.read(Rows.of(tokens(40, VOCAB), wanted=[]))
    own, cross, source = (*machine.own, *machine.beside)
    assert (len(cross.holders), len(cross.free)) == (3, 0) and len(source.free) == len(source.holders) == 3
    machine.step(Rows.of(tokens(17, VOCAB)))
    machine.fork(0, 5)
    assert own.holders == [2, 2] and cross.holders == [2, 2, 2]
    machine.forget(0, 16)
    assert own.holders == [2, 1] and cross.holders == [2, 2, 2]
    machine.forget(0), machine.forget(5)
    for group in (*machine.own, *machine.beside):
        assert len(group.free) == len(group.holders)


@needs_native
def test_the_native_cache_clears_and_copies_all_slots_of_a_group_alone() -> None:
    """By answers: a fork's copy is of every layer, and a source is untouched by what the texts do."""
    spec = ENCODER_DECODERS["encoder-decoder-pre-norm"]
    machine = Native(lower(spec), weights(spec), threads=1)
    source, rows = tokens(20, VOCAB, 1), tokens(30, VOCAB, 2)
    for sequence in (0, 2):
        machine.read(Rows.of(source, sequence=sequence, wanted=[]))
    alone = machine.step(Rows.of(rows, sequence=2))
    machine.step(Rows.of(rows[:20]))
    machine.fork(0, 1)
    for sequence in (0, 1):  # the first that writes has a copy from then on
        assert np.array_equal(machine.step(Rows.of(rows[20:], 20, sequence)), alone[20:])
    assert import_module(NAME).Cache([(0, 1, 6, 6)], 1, 0).block_bytes(0) == 4 * 16 * (8 + 16)
