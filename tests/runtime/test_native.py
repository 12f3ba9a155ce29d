"""The native runtime gives what the reference gives, over every variant and on every instruction set."""

from __future__ import annotations

import time
from functools import cache
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from qkv.checkpoints import StoredTensor
from qkv.errors import RequestError, UnsupportedError
from qkv.runtime import program as op
from qkv.runtime.built import NAME
from qkv.runtime.interpreter import Rows
from qkv.runtime.lower import Lowered, lower
from qkv.runtime.native import CACHE_TYPES, CacheType, Native
from qkv.spec import (
    Alibi,
    Attention,
    Buckets,
    Causal,
    Chunk,
    Dense,
    Everything,
    LayerNorm,
    Model,
    Score,
    Window,
    pre_norm,
)
from tests.matrix.variants import (
    BIDIRECTIONAL,
    ENCODER_DECODERS,
    LOOKING,
    VARIANTS,
    VOCAB,
    attention,
    both,
    cross,
    model,
    of,
)
from tests.runtime.native_models import (
    SETS,
    bf16,
    farthest,
    in_bytes,
    needs_native,
    network,
    tokens,
    typed,
    weights,
)
from tests.runtime.test_lowering import ALL, EXPRESSED, tolerance

pytestmark = needs_native
SOURCE = tokens(9, VOCAB, 7)
LENGTH, LONG = 13, 300


def machine(
    spec: Model, set_: str | None = None, cache_type: CacheType | None = None, threads: int = 2
) -> Native:
    return Native(lower(spec), weights(spec), threads, cache_type, set_)


@cache
def reference(spec: Model, length: int, source: tuple[int, ...] = tuple(SOURCE), seed: int = 1) -> np.ndarray:
    """The logits of `tokens(length, VOCAB, seed)`, or hidden states where there is no head."""
    given = (
        {"source": torch.tensor([source])} if spec.encoder is not None and spec.decoder is not None else {}
    )
    with torch.no_grad():
        found: np.ndarray = network(spec)(torch.tensor([tokens(length, VOCAB, seed)]), **given)[0].numpy()
    return found


@pytest.mark.parametrize("set_", SETS)
@pytest.mark.parametrize("name", EXPRESSED)
def test_equals_the_reference(name: str, set_: str) -> None:
    native = machine(ALL[name], set_)
    assert (native.instruction_set, native.cache_type) == (set_, "f32")
    native.read(Rows.of(SOURCE, wanted=[]))
    assert farthest(
        native.step(Rows.of(tokens(LENGTH, VOCAB, 1))), reference(ALL[name], LENGTH)
    ) <= tolerance(name)


# past a split of 128 tokens and past blocks of 16, at places that are multiples of neither
FAR: dict[str, Model] = {
    "plain": of(attention()),
    "seven-heads-share-one": of(attention(7, 1)),
    "value-dim": of(attention(value_dim=37)),
    "window-of-a-few": of(attention(mask=Causal() & Window(5))),
    "window-past-a-split": of(attention(mask=Causal() & Window(150))),
    "chunk": of(attention(mask=Causal() & Chunk(27))),
    "chunk-past-a-split": of(attention(mask=Causal() & Chunk(131))),
    "sink": of(attention(score=Score(sink=True), mask=Causal() & Window(40))),
    "cap": of(attention(score=Score(cap=2.0))),
    "alibi": of(attention(6, 2, position=Alibi())),
    "alibi-capped": of(attention(position=Alibi(), score=Score(cap=1.0), mask=Causal() & Window(140))),
    "buckets": of(attention(position=Buckets(32, 128, False))),
    "buckets-both-ways": of(attention(position=Buckets(32, 128), mask=Everything())),
    "both-ways": of(attention(mask=Everything())),
    "window-both-ways": of(attention(mask=Window(20, 33))),
    "a-source-in-a-window": both(
        pre_norm(LOOKING, Dense("gelu", 20)),
        pre_norm(attention(), cross(mask=Window(30, 10)), Dense("gelu", 20)),
        norm=LayerNorm(),
    ),
    "encoder-decoder": ENCODER_DECODERS["encoder-decoder-of-all-parts"],
}
FAR_SOURCE = tuple(tokens(277, VOCAB, 8))


@pytest.mark.parametrize("set_", SETS)
@pytest.mark.parametrize("name", FAR)
def test_equals_the_reference_far_into_a_text(name: str, set_: str) -> None:
    native, given = machine(FAR[name], set_), tokens(LONG, VOCAB, 1)
    native.read(Rows.of(list(FAR_SOURCE), wanted=[]))
    found = native.step(Rows.of(given))
    assert farthest(found, reference(FAR[name], LONG, FAR_SOURCE)) < 1e-5
    # the last one by itself: then the splits of the cache are shared out between the threads
    native.forget(0, LONG - 1)
    assert np.array_equal(native.step(Rows.of(given[-1:], LONG - 1)), found[-1:])


@pytest.mark.parametrize("set_", SETS)
@pytest.mark.parametrize("name", [name for name in EXPRESSED if name not in BIDIRECTIONAL])
def test_answers_are_the_same_where_few_are_wanted(name: str, set_: str) -> None:
    native, rows = machine(ALL[name], set_), tokens(LENGTH, VOCAB, 1)
    native.read(Rows.of(SOURCE, wanted=[]))
    whole = native.step(Rows.of(rows))
    native.forget(0, 4)
    assert np.array_equal(native.step(Rows.of(rows[4:], 4, wanted=[0, 5, 8])), whole[[4, 9, 12]])


# attention alone, over tables of queries, keys and values ----------------------------------------

HEADS, KV_HEADS, KEY, VALUE = 6, 2, 20, 24
WIDTHS = HEADS * KEY, KV_HEADS * KEY, KV_HEADS * VALUE
SCALE = 0.3


def attention_alone() -> Lowered:
    query, key, value = (op.Span("rows", sum(WIDTHS[:i]), width) for i, width in enumerate(WIDTHS))
    mixed, picked = (op.Span(name, 0, HEADS * VALUE) for name in ("mixed", "picked"))
    operations = (
        op.TakeRows(op.Span("rows", 0, sum(WIDTHS)), "table"),
        op.Store("slot", key, value),
        op.Attend(mixed, query, "slot", HEADS, KV_HEADS, SCALE, op.Sight(after=0)),
        op.Pick((picked,), (mixed,)),
    )
    buffers = {"rows": sum(WIDTHS), "mixed": mixed.width, "picked": mixed.width}
    return Lowered(op.Program(operations, picked, buffers, {"slot": op.Slot(KV_HEADS, KEY, VALUE)}))


def attended(table: np.ndarray, cache_type: CacheType, sizes: bool = False) -> np.ndarray:
    """In float64, over queries, keys and values as a cache of this type rounds them; or sizes of values."""
    query, key, value = np.split(table, np.cumsum(WIDTHS)[:2], axis=1)
    if cache_type == "bf16":
        query, key, value = bf16(query * np.float32(SCALE)), bf16(key), bf16(value)
    elif cache_type == "int8":
        query, key, value = in_bytes(query, KEY) * SCALE, in_bytes(key, KEY), in_bytes(value, VALUE)
    else:
        query = query * np.float32(SCALE)
    q = query.reshape(LONG, HEADS, KEY).astype(np.float64)
    k, v = (np.repeat(x.reshape(LONG, KV_HEADS, -1), 3, 1).astype(np.float64) for x in (key, value))
    scores = np.einsum("qhd,khd->hqk", q, k)
    scores = np.where(np.tri(LONG, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", shares, np.abs(v) if sizes else v).reshape(LONG, -1)


@pytest.mark.parametrize("set_", SETS)
@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_a_cache_rounds_as_its_type_says_and_no_more(cache_type: CacheType, set_: str) -> None:
    """Queries, keys and values; in bfloat16 the shares as well, each by 2^-8 of itself at most."""
    table = np.random.default_rng(2).standard_normal((LONG, sum(WIDTHS)), np.float32)
    given = {"table": StoredTensor.from_array("table", table)}
    native = Native(attention_alone(), given, 2, cache_type, set_)
    found, exact = native.step(Rows.of(list(range(LONG)))), attended(table, cache_type)
    if cache_type == "bf16":
        # |sum of (1 + e) * share * value - sum of share * value| <= 2^-8 * sum of share * |value|
        assert (np.abs(found - exact) <= 2**-8 * attended(table, cache_type, sizes=True) + 1e-6).all()
        assert farthest(found, exact) < 2e-3  # errors of either sign
    else:
        assert farthest(found, exact) < 2e-6
    # what the type costs: nothing, half of 2^-8, half of 1/127 of the largest in a head
    assert farthest(attended(table, "f32"), exact) < {"f32": 1e-9, "bf16": 1e-2, "int8": 3e-2}[cache_type]


@pytest.mark.parametrize("set_", SETS)
@pytest.mark.parametrize(
    "name", ["grouped", "value-dim", "window", "sink", "cap", "alibi", "bidirectional-buckets"]
)
def test_caches_of_fewer_bits_stay_near_the_reference(name: str, set_: str) -> None:
    """bfloat16 keeps 8 bits and a byte 7: two layers stay within the tolerance of bfloat16, or twice that."""
    rows = Rows.of(tokens(LENGTH, VOCAB, 1))
    for cache_type, bound in (("bf16", 2e-2), ("int8", 4e-2)):
        found = machine(ALL[name], set_, cache_type).step(rows)  # type: ignore[arg-type]
        assert 1e-5 < farthest(found, reference(ALL[name], LENGTH)) < bound


# rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("set_", SETS)
def test_each_text_reads_its_own_source_whatever_its_length(set_: str) -> None:
    spec = ENCODER_DECODERS["encoder-decoder-pre-norm"]
    native = machine(spec, set_)
    sources = [tokens(count, VOCAB, count) for count in (5, 140, 20, 1)]
    texts = [tokens(count, VOCAB, 1) for count in (30, 3, 17, 1)]
    native.read(Rows.together(*(Rows.of(source, sequence=i, wanted=[]) for i, source in enumerate(sources))))
    found = native.step(Rows.together(*(Rows.of(text, sequence=i) for i, text in enumerate(texts))))
    for source, text in zip(sources, texts, strict=True):
        answers, found = found[: len(text)], found[len(text) :]
        assert farthest(answers, reference(spec, len(text), tuple(source))) < 1e-5


def test_only_wanted_rows_are_answered() -> None:
    native, given = machine(VARIANTS["grouped"]), tokens(40, VOCAB)
    whole = native.step(Rows.of(given))
    assert whole.shape == (40, VOCAB) == (40, native.width)
    native.forget(0)
    assert native.step(Rows.of(given[:20], wanted=[])).shape == (0, VOCAB)
    # in the order they are asked for, and as often
    wanted = [19, 3, 3, 0]
    assert np.array_equal(native.step(Rows.of(given[20:], 20, wanted=wanted)), whole[[39, 23, 23, 20]])


def test_an_answer_is_the_callers_to_keep() -> None:
    native = machine(VARIANTS["grouped"])
    first = native.step(Rows.of([1, 2, 3]))
    kept = first.copy()
    native.step(Rows.of([4, 5, 6], 3))
    assert np.array_equal(first, kept)


@pytest.mark.parametrize("name", ["token-types", "masked-language"])
def test_types_are_taken_and_are_0_where_none_are_given(name: str) -> None:
    spec, given, types = ALL[name], tokens(6, VOCAB, 1), [0, 1, 1, 0, 1, 0]
    with torch.no_grad():
        expected = network(spec)(torch.tensor([given]), types=torch.tensor([types]))[0].numpy()
    native = machine(spec)
    assert farthest(native.step(typed(given, types)), expected) < 1e-5
    native.forget(0)
    assert np.array_equal(native.step(Rows.of(given)), machine(spec).step(typed(given, [0] * 6)))


def test_a_model_without_attention_runs() -> None:
    spec = model(pre_norm(Dense("relu", 20)))
    assert farthest(machine(spec).step(Rows.of(tokens(9, VOCAB, 1))), reference(spec, 9)) < 1e-5


def test_an_encoder_without_attention_runs() -> None:
    spec = both(pre_norm(Dense("gelu", 20)), pre_norm(attention(), cross(), Dense("gelu", 20)))
    native = machine(spec)
    native.read(Rows.of(SOURCE, wanted=[]))
    assert farthest(native.step(Rows.of(tokens(LENGTH, VOCAB, 1))), reference(spec, LENGTH)) < 1e-5


# what is refused ----------------------------------------------------------------------------------


def test_heads_of_512_run_and_larger_ones_are_refused() -> None:
    at_most = of(Attention(1, 1, 512, mask=Causal()))
    assert farthest(machine(at_most).step(Rows.of(tokens(20, VOCAB, 1))), reference(at_most, 20)) < 1e-5
    with pytest.raises(UnsupportedError, match="no heads of more than 512 dimensions"):
        machine(of(Attention(1, 1, 516, mask=Causal())))
    with pytest.raises(ValueError, match="too many dimensions"):  # nor does the module rely on it
        import_module(NAME).Cache([(0, 1, 513, 16)], 1, 0)


@pytest.mark.parametrize("token", [VOCAB, -1, 2**31 - 1])
def test_a_token_outside_the_table_is_refused_and_changes_nothing(token: int) -> None:
    native, given = machine(VARIANTS["grouped"]), tokens(20, VOCAB)
    whole = native.step(Rows.of(given, sequence=1))
    native.step(Rows.of(given[:5]))
    with pytest.raises(RequestError, match=f"Token, position or type {token} has no row"):
        native.step(Rows.of([*given[5:9], token], 5))
    assert np.array_equal(native.step(Rows.of(given[5:], 5)), whole[5:])


def test_a_token_past_32_bits_is_refused() -> None:
    with pytest.raises(RequestError):
        machine(VARIANTS["grouped"]).step(Rows.of([2**32 + 1]))


def test_a_refused_step_leaves_nothing_that_looks_ahead() -> None:
    native = machine(ALL["bidirectional-rotary"])
    whole = native.step(Rows.of([1, 2, 3], sequence=1))
    with pytest.raises(RequestError):
        native.step(Rows.of([1, 2, 3, 4, VOCAB]))
    assert np.array_equal(native.step(Rows.of([1, 2, 3])), whole)


@pytest.mark.parametrize("wanted", [[2], [-1]])
def test_a_wanted_row_that_is_not_there_is_refused(wanted: list[int]) -> None:
    with pytest.raises(RequestError, match="a row that is wanted is not there"):
        machine(VARIANTS["grouped"]).step(Rows.of([1, 2], wanted=wanted))


def test_a_position_or_type_outside_its_table_is_refused() -> None:
    with pytest.raises(RequestError, match="type 40 has no row"):  # of 40, from 0
        machine(VARIANTS["learned"]).step(Rows.of([1, 2], 39))
    with pytest.raises(RequestError, match="type 2 has no row"):
        machine(VARIANTS["token-types"]).step(typed([1, 2], [0, 2]))


def test_a_step_without_rows_is_refused() -> None:
    with pytest.raises(RequestError, match="at least one row"):
        machine(VARIANTS["grouped"]).step(Rows.of([]))


def test_the_instruction_set_is_the_one_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = VARIANTS["grouped"]
    monkeypatch.delenv("QKV_ISA", raising=False)
    assert machine(spec).instruction_set == SETS[0]
    monkeypatch.setenv("QKV_ISA", SETS[-1])
    assert machine(spec).instruction_set == SETS[-1]
    assert machine(spec, SETS[0]).instruction_set == SETS[0]  # what is said is stronger
    monkeypatch.setenv("QKV_ISA", "sse9")
    with pytest.raises(RequestError, match="instruction set 'sse9' cannot be had here"):
        machine(spec)
    monkeypatch.setenv("QKV_ISA", "")
    with pytest.raises(RequestError, match=f"'none' cannot be had here.*{SETS[-1]}"):
        machine(spec, "none")


def test_a_cache_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(RequestError, match="holds f32, bf16 or int8, not 'f16'"):
        machine(VARIANTS["grouped"], cache_type="f16")  # type: ignore[arg-type]


def test_the_cache_is_exact_where_the_weights_are_else_bf16() -> None:
    spec = VARIANTS["grouped"]
    assert machine(spec).cache_type == "f32"
    assert Native(lower(spec), weights(spec, "BF16"), 1).cache_type == "bf16"
    assert Native(lower(spec), weights(spec, "BF16"), 1, "int8").cache_type == "int8"


# threads ------------------------------------------------------------------------------------------


def test_threads_that_wait_take_no_time() -> None:
    """They look for work for a fifth of a millisecond, and then sleep."""
    native = machine(VARIANTS["grouped"], threads=4)
    native.step(Rows.of(tokens(64, VOCAB)))
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05


def alive() -> int:
    """The threads of this process, where the system says."""
    folder = Path("/proc/self/task")
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0


def test_threads_end_with_what_they_work_for() -> None:
    before = alive()
    for _ in range(50):
        workers = import_module(NAME).Workers(4)
        assert workers.count == 4
        del workers
    native = machine(VARIANTS["grouped"], threads=3)
    native.step(Rows.of([1, 2, 3]))
    assert alive() in (0, before + 2)  # the caller is the third
    del native
    for _ in range(200):  # a thread that has ended stands in the list for a moment
        if alive() <= before:
            break
        time.sleep(0.01)
    assert alive() <= before
