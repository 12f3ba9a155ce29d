"""Machines: equal to the reference through pieces, copies and truncation; how texts share one."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from qkv.checkpoints import StoredTensor
from qkv.nn import Transformer
from qkv.runtime.interpreter import Rows
from qkv.runtime.lower import lower
from qkv.runtime.machine import Interpreted, cache_values
from qkv.spec import Model
from tests.matrix.variants import ENCODER_DECODERS, VARIANTS, VOCAB
from tests.support import assert_close, random_model

TOKENS = [5, 9, 2, 7, 7, 1, 30, 4]


def stored(network: Transformer) -> Mapping[str, StoredTensor]:
    return {
        name: StoredTensor.from_array(name, values.detach().numpy())
        for name, values in network.named_parameters()
    }


def made(spec: Model) -> tuple[Interpreted, Transformer]:
    network = random_model(spec)
    return Interpreted(lower(spec), stored(network)), network


def logits(network: Transformer, tokens: list[int], source: list[int] | None = None) -> torch.Tensor:
    with torch.no_grad():
        given = {} if source is None else {"source": torch.tensor([source])}
        return network(torch.tensor([tokens]), **given)[0]


def test_a_step_gives_the_wanted_rows_only_and_may_give_none() -> None:
    machine, network = made(VARIANTS["grouped"])
    assert machine.width == VOCAB
    assert machine.step(Rows.of(TOKENS[:5], wanted=[])).shape == (0, VOCAB)
    found = machine.step(Rows.of(TOKENS[5:], 5, wanted=[2]))
    assert_close(found, logits(network, TOKENS)[-1:])


def test_a_copy_goes_on_by_itself() -> None:
    machine, network = made(VARIANTS["grouped"])
    machine.step(Rows.of(TOKENS[:4], sequence=3))
    machine.fork(3, 8)
    ahead, beside = [*TOKENS[:4], 11, 12], [*TOKENS[:4], 21, 22]
    for place in (4, 5):
        rows = Rows.together(Rows.of([ahead[place]], place, 3), Rows.of([beside[place]], place, 8))
        found = machine.step(rows)
        assert_close(found[:1], logits(network, ahead[: place + 1])[-1:])
        assert_close(found[1:], logits(network, beside[: place + 1])[-1:])
    machine.forget(3)
    assert_close(machine.step(Rows.of([5], 6, 8)), logits(network, [*beside, 5])[-1:])


def test_what_is_forgotten_is_gone() -> None:
    machine, network = made(VARIANTS["grouped"])
    machine.step(Rows.of(TOKENS))
    machine.forget(0, 3)
    assert_close(machine.step(Rows.of([40], 3)), logits(network, [*TOKENS[:3], 40])[-1:])
    machine.forget(0)
    assert not machine.kept.slots
    assert_close(machine.step(Rows.of(TOKENS)), logits(network, TOKENS))


def test_a_source_is_kept_until_all_is_forgotten() -> None:
    machine, network = made(next(iter(ENCODER_DECODERS.values())))
    source = [3, 1, 4, 1, 5]
    machine.read(Rows.of(source, wanted=[]))
    machine.step(Rows.of(TOKENS))
    machine.forget(0, 2)
    machine.fork(0, 1)
    found = machine.step(Rows.together(Rows.of([6], 2, 0), Rows.of([8], 2, 1)))
    for row, token in enumerate((6, 8)):
        assert_close(found[row : row + 1], logits(network, [*TOKENS[:2], token], source)[-1:])
    machine.forget(0), machine.forget(1)
    assert not machine.kept.slots


@pytest.mark.parametrize("name", ["grouped", "value-dim", "encoder-decoder-pre-norm", "encoder-decoder-tied"])
def test_the_bytes_of_a_sequence_are_those_it_takes(name: str) -> None:
    spec = {**VARIANTS, **ENCODER_DECODERS}[name]
    machine, _ = made(spec)
    source = 5 if machine.source is not None else 0
    if source:
        machine.read(Rows.of(TOKENS[:source], wanted=[]))
    machine.step(Rows.of(TOKENS))
    used = {name for name in machine.kept.slots if name[0] in machine.lowered.main.slots}
    taken = sum(part.nbytes for name in used for part in machine.kept.slots[name])
    assert (
        machine.bytes_for(len(TOKENS), source)
        == taken
        == 4 * cache_values(machine.lowered, len(TOKENS), source)
    )
    assert taken == spec.cache_bytes(len(TOKENS), bytes_per_value=4, source=source)
