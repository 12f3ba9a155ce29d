"""The cache: positions, room, reset, and staying intact after an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qkv.errors import CapacityError, RequestError
from qkv.nn import ContiguousCache, Layout
from qkv.nn.attention import Attention
from qkv.spec import Attention as Node, DynamicNTK, Rotary, Stack, Tokens, pre_norm
from tests.matrix.variants import VARIANTS, VOCAB, attention, of
from tests.support import assert_close, random_model

SPEC = VARIANTS["grouped"]


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(2))


def test_a_second_chunk_counts_on_and_sees_the_first() -> None:
    """Case C3: 40 tokens in chunks of 32: positions 32 to 39, 8 queries, 40 keys."""
    cache = ContiguousCache(SPEC.trunk, 1, 40)
    cache.extend(Layout.unpadded(1, 32))
    layout = cache.extend(Layout.unpadded(1, 8))
    assert layout.positions.tolist() == [list(range(32, 40))]
    assert layout.key_positions.tolist() == [list(range(40))]


@pytest.mark.parametrize("chunk", [1, 3, 7, 32, 40])
def test_chunks_of_any_size_equal_one_pass(chunk: int) -> None:
    """Case C3."""
    model, ids = random_model(SPEC), tokens(1, 40)
    cache = ContiguousCache(SPEC.trunk, 1, 40)
    pieces = [model(piece, cache=cache) for piece in ids.split(chunk, dim=1)]
    assert_close(torch.cat(pieces, 1), model(ids))


def test_any_place_to_cut_gives_the_whole() -> None:
    """D27: every split of a text into a prompt and the rest."""
    model, ids = random_model(SPEC), tokens(2, 12)
    whole = model(ids)
    for at in range(1, 12):
        cache = ContiguousCache(SPEC.trunk, 2, 12)
        assert_close(torch.cat([model(ids[:, :at], cache=cache), model(ids[:, at:], cache=cache)], 1), whole)


def test_beams_that_both_come_of_one_parent_hold_its_keys() -> None:
    """Case C1: A = [1, 2] and B = [1, 3], both survivors from B."""
    model, cache = random_model(SPEC), ContiguousCache(SPEC.trunk, 2, 3)
    model(torch.tensor([[1, 2], [1, 3]]), cache=cache)
    before = {name: [tensor.clone() for tensor in held] for name, held in cache.layers.items()}
    cache.select(torch.tensor([1, 1]))
    for name, held in cache.layers.items():
        for now, then in zip(held, before[name], strict=True):
            assert torch.equal(now[0], then[1]) and torch.equal(now[1], then[1])
            assert not torch.equal(now[0], then[0])


def test_a_reset_cache_is_as_new() -> None:
    """Case C5: 5 tokens, reset, 3: length 3 and the result of a fresh cache."""
    model, ids = random_model(SPEC), tokens(1, 8)
    cache = ContiguousCache(SPEC.trunk, 1, 8)
    model(ids[:, :5], cache=cache)
    cache.reset()
    assert cache.length == 0
    again = model(ids[:, 5:], cache=cache)
    assert cache.length == 3
    assert torch.equal(again, model(ids[:, 5:], cache=ContiguousCache(SPEC.trunk, 1, 8)))


def test_another_batch_is_refused_and_the_cache_still_serves() -> None:
    """Case C5: a cache for 4 rows given 8."""
    model, ids = random_model(SPEC), tokens(8, 6)
    cache = ContiguousCache(SPEC.trunk, 4, 6)
    first = model(ids[:4, :3], cache=cache)
    with pytest.raises(RequestError, match="holds 4 rows and the call has 8"):
        model(ids[:, 3:], cache=cache)
    rest = model(ids[:4, 3:], cache=cache)
    assert_close(torch.cat([first, rest], 1), model(ids[:4]))


def test_prompt_and_new_tokens_need_all_but_one_slot() -> None:
    """Case C7: prompt 32 and 16 new fit 47 slots; 46 are refused before anything is written."""
    model, ids = random_model(SPEC), tokens(1, 48)

    def run(capacity: int) -> ContiguousCache:
        cache = ContiguousCache(SPEC.trunk, 1, capacity)
        model(ids[:, :32], cache=cache)
        for at in range(32, 47):  # the 16th new token is chosen, never looked back at
            model(ids[:, at : at + 1], cache=cache)
        return cache

    assert run(47).length == 47
    with pytest.raises(CapacityError, match="room for 46 tokens and the call needs 47"):
        run(46)


def test_overflow_leaves_the_cache_as_it_was() -> None:
    """Case C7."""
    model, ids = random_model(SPEC), tokens(1, 8)
    cache = ContiguousCache(SPEC.trunk, 1, 6)
    model(ids[:, :4], cache=cache)
    before = [tensor.clone() for pair in cache.layers.values() for tensor in pair]
    with pytest.raises(CapacityError):
        model(ids[:, 4:8], cache=cache)
    after = [tensor for pair in cache.layers.values() for tensor in pair]
    assert cache.length == 4 and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert_close(model(ids[:, 4:6], cache=cache), model(ids[:, :6])[:, 4:])


def test_a_call_that_fails_halfway_is_forgotten() -> None:
    model, ids = random_model(SPEC), tokens(1, 8)
    cache = ContiguousCache(SPEC.trunk, 1, 8)
    model(ids[:, :4], cache=cache)

    def fail(*_: object) -> None:
        raise RuntimeError("in the second layer")

    handle = model.decoder.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="second layer"):
        model(ids[:, 4:], cache=cache)
    handle.remove()
    assert cache.length == 4
    assert_close(model(ids[:, 4:], cache=cache), model(ids)[:, 4:])


@pytest.mark.parametrize("keep", [0, 1, 5, 7])
def test_rolling_back_equals_never_having_run(keep: int) -> None:
    """D27: after a rejected guess the cache goes on from any earlier place."""
    model, ids, wrong = random_model(SPEC), tokens(1, 10), tokens(1, 17)[:, 10:]
    cache = ContiguousCache(SPEC.trunk, 1, 16)
    model(torch.cat([ids[:, :keep], wrong], 1), cache=cache)
    cache.truncate(keep)
    assert_close(model(ids[:, keep:], cache=cache), model(ids)[:, keep:])


def test_a_long_call_does_not_change_a_later_short_one() -> None:
    """Case P7 on a whole model, and D17: keys are kept unrotated, so a grown base turns old ones too."""
    node = of(attention(position=Rotary(100.0, scaling=DynamicNTK(2.0, 8))))
    model, ids = random_model(node), tokens(1, 16)
    short = model(ids[:, :8])
    model(ids)
    assert torch.equal(model(ids[:, :8]), short)
    cache = ContiguousCache(node.trunk, 1, 16)
    seen = {}

    def first_layer_keys(cached: ContiguousCache | None) -> torch.Tensor:
        layer = model.decoder.layers[0].attention
        attend = layer.backend.attend

        class Keys:
            name = "keys"

            def attend(self, query: Any, key: torch.Tensor, *rest: object, **more: object) -> object:
                seen["keys"] = key
                return attend(query, key, *rest, **more)

        layer.backend = Keys()
        for piece in ids.split(4, dim=1) if cached else [ids]:
            model(piece, cache=cached)
        layer.backend = type(model.decoder.layers[1].attention).backend
        return seen["keys"]

    assert_close(first_layer_keys(cache), first_layer_keys(None))


def test_documents_and_a_cache_do_not_mix() -> None:
    cache = ContiguousCache(SPEC.trunk, 1, 8)
    with pytest.raises(RequestError, match="Packed documents"):
        cache.extend(Layout.packed([2, 3]))


def test_the_bytes_of_a_cache_are_those_the_description_counts() -> None:
    """D31: 2 * layers * kv_heads * head_dim * bytes a token."""
    cache = ContiguousCache(SPEC.trunk, 3, 10)
    assert cache.bytes == 3 * SPEC.cache_bytes(10, bytes_per_value=4)


@pytest.mark.parametrize("name", ["transformer-xl", "grouped", "latent", "gated-delta", "state-space"])
def test_gradients_end_at_what_earlier_calls_left(name: str) -> None:
    """D12: a memory is a constant. Segment by segment a model learns as from memories without a graph."""
    model, ids = random_model(VARIANTS[name]), torch.arange(12)[None]
    table = model.decoder.embedding.weight

    def learned(graph: bool) -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        cache = ContiguousCache(model.spec.trunk, 1, 12)
        for segment in ids.split(4, dim=1)[:2]:
            with torch.set_grad_enabled(graph):
                out = model(segment, cache=cache)
            if graph:
                out.square().sum().backward()
                model.zero_grad()
        out = model(ids[:, 8:], cache=cache)
        out.square().sum().backward()
        return out, table.grad

    (out, found), (expected, constant) = learned(True), learned(False)
    assert torch.equal(out, expected) and torch.equal(found, constant)
    assert found.abs().sum(-1).nonzero().flatten().tolist() == [8, 9, 10, 11]
    model.zero_grad()
    whole = model(ids)[:, 8:]
    whole.square().sum().backward()
    assert_close(out, whole)
    assert table.grad.abs().sum(-1).nonzero().flatten().tolist() == list(range(12))


# --- states and what is read --------------------------------------------------------------------


def states_of(cache: ContiguousCache) -> list[torch.Tensor]:
    return [tensor.clone() for i in (0, 1) for tensor in cache.state(f"{i}.mixer") or ()]


HYBRIDS = pytest.mark.parametrize("name", ["gated-delta", "state-space"])


@HYBRIDS
@torch.no_grad()
def test_a_state_goes_back_one_call_or_to_the_beginning(name: str) -> None:
    """D27: the states of before the last call are kept; those further back are gone, and it says so."""
    model, ids = random_model(VARIANTS[name]), tokens(1, 12)
    cache = ContiguousCache(model.spec.trunk, 1, 12)
    assert cache.state("0.mixer") is None
    model(ids[:, :3], cache=cache)
    after_three = states_of(cache)
    model(ids[:, 3:5], cache=cache)
    after_five = states_of(cache)
    model(ids[:, 5:9], cache=cache)
    with pytest.raises(CapacityError, match="cannot go back to 4 tokens: it kept none on the way"):
        cache.truncate(4)
    with pytest.raises(CapacityError, match="cannot go back to 6 tokens"):
        cache.truncate(6)
    assert cache.length == 9
    cache.truncate(5)
    assert all(torch.equal(a, b) for a, b in zip(states_of(cache), after_five, strict=True))
    cache.truncate(5)  # again, and further than it holds, changes nothing
    cache.truncate(8)
    assert cache.length == 5 and cache.state("0.mixer") is not None
    with pytest.raises(CapacityError, match="cannot go back to 3 tokens"):
        cache.truncate(3)
    assert not all(torch.equal(a, b) for a, b in zip(after_three, after_five, strict=True))
    assert_close(model(ids[:, 5:], cache=cache), model(ids)[:, 5:])
    cache.truncate(0)
    assert cache.state("0.mixer") is None and cache.length == 0
    assert_close(model(ids, cache=cache), model(ids))


@HYBRIDS
@torch.no_grad()
def test_a_call_refused_for_room_leaves_states_as_they_were(name: str) -> None:
    """Case C7 for states: refused before anything is written, and it still serves."""
    model, ids = random_model(VARIANTS[name]), tokens(1, 8)
    cache = ContiguousCache(model.spec.trunk, 1, 6)
    model(ids[:, :2], cache=cache)
    model(ids[:, 2:4], cache=cache)
    before = states_of(cache)
    with pytest.raises(CapacityError, match="room for 6 tokens and the call needs 8"):
        model(ids[:, 4:8], cache=cache)
    assert all(torch.equal(a, b) for a, b in zip(before, states_of(cache), strict=True))
    assert_close(model(ids[:, 4:6], cache=cache), model(ids[:, :6])[:, 4:])


def test_what_is_kept_is_made_once_until_the_beginning_comes_again() -> None:
    cache, made = ContiguousCache(SPEC.trunk, 1, 4), iter(range(1, 9))

    def make() -> tuple[torch.Tensor, ...]:
        return (torch.full((2,), float(next(made))),)

    assert [float(cache.keep(name, make)[0][0]) for name in ("a", "a", "b", "a")] == [1, 1, 2, 1]
    cache.extend(Layout.unpadded(1, 3))
    cache.truncate(2)
    assert float(cache.keep("a", make)[0][0]) == 1
    cache.truncate(0)
    assert float(cache.keep("a", make)[0][0]) == 3
    cache.reset()
    assert float(cache.keep("a", make)[0][0]) == 4


@torch.no_grad()
def test_empty_slots_take_no_part() -> None:
    """Case C7: room for 4 and 2 held, equal scores over 1 and 3: their mean is 2, not 1."""
    module = Attention(Node(1, 1, 1), 1)
    for part, value in ((module.query, 0.0), (module.key, 0.0), (module.value, 1.0), (module.output, 1.0)):
        torch.nn.init.constant_(part.weight, value)
    cache = ContiguousCache(Stack(Tokens(2, 1), (pre_norm(Node(1, 1, 1)),)), 1, 4)
    layout = cache.extend(Layout.unpadded(1, 2))
    out = module(torch.tensor([[[1.0], [3.0]]]), layout, cache, "0.attention")
    assert out.flatten().tolist() == [1, 2]
    assert cache.layers["0.attention"][0].shape[2] == 4


@torch.no_grad()
def test_what_lies_in_unused_slots_is_never_read() -> None:
    """NaN where nothing was stored yet, and where a rejected guess stood, reaches no output."""
    model, ids = random_model(SPEC), tokens(2, 6)
    cache = ContiguousCache(SPEC.trunk, 2, 9)

    def poison(start: int) -> None:
        for held in cache.layers.values():
            for tensor in held:
                tensor[:, :, start:] = float("nan")

    poison(0)
    model(ids[:, :4], cache=cache)
    model(ids[:, :3], cache=cache)
    cache.truncate(4)
    poison(4)
    assert_close(model(ids[:, 4:], cache=cache), model(ids)[:, 4:])


@HYBRIDS
@torch.no_grad()
def test_the_way_back_is_that_of_the_rows_as_they_stand_now(name: str) -> None:
    """A rejected guess after beams have changed rows: each goes back to the state of its own text."""
    model, ids, rows = random_model(VARIANTS[name]), tokens(2, 8), torch.tensor([1, 1, 0])
    cache = ContiguousCache(model.spec.trunk, 2, 12)
    model(ids[:, :4], cache=cache)
    model(ids[:, 4:6], cache=cache)
    cache.select(rows)
    cache.truncate(4)
    assert_close(model(ids[rows, 4:], cache=cache), model(ids[rows])[:, 4:])
