"""What a scheduler holds between two steps, as plain values, and a pure function that finds what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qkv.engine.scheduler import Scheduler
from qkv.engine.tasks import Task
from qkv.runtime.blocks import BLOCK, Pool, blocks


@dataclass(frozen=True)
class Table:
    """The blocks of a sequence, where they stand, and how many tokens it has room for."""

    places: tuple[int, ...]
    length: int
    held: tuple[int, ...]
    evicted: int = 0  # how many of its tokens were given up


@dataclass(frozen=True)
class PoolState:
    group: int
    window: int | None  # so many of its last tokens a query sees; None: all
    first: int  # and so many of the first
    limit: int | None
    holders: tuple[int, ...]
    free: tuple[int, ...]
    cached: tuple[int, ...]
    published: Mapping[int, tuple[int, ...]]  # the tokens of each block that others may begin with
    tables: Mapping[int, Table]


@dataclass(frozen=True)
class TextState:
    number: int
    tokens: tuple[int, ...]
    computed: int
    running: bool
    answered: bool  # whether logits wait for the others of its task


@dataclass(frozen=True)
class Snapshot:
    """Between two steps. Of `count` sequence numbers `spare` were given back, and `lent` are no text's."""

    pools: tuple[PoolState, ...]
    texts: tuple[TextState, ...]
    spare: tuple[int, ...]
    lent: tuple[int, ...]
    count: int
    both: int  # tasks that wait and run at once


def snapshot(scheduler: Scheduler) -> Snapshot:
    """A copy that later steps do not touch."""
    tasks = [*scheduler.running, *scheduler.waiting]
    return Snapshot(
        tuple(_pool(scheduler, pool) for pool in scheduler.machine.own),
        tuple(text for task in tasks for text in _texts(task)),
        tuple(scheduler._free),
        tuple(scheduler.lent),
        scheduler._count,
        len(tasks) - len({id(task) for task in tasks}),
    )


def _texts(task: Task) -> Iterator[TextState]:
    for text in task.alive():
        waits = text.logits is not None
        yield TextState(text.number, tuple(text.tokens), text.computed, task.running, waits)


def _pool(scheduler: Scheduler, pool: Pool) -> PoolState:
    tables = {
        number: Table(
            tuple(pool.places(number)),
            int(pool.lengths[number]),
            tuple(pool.held(number)),
            pool.evicted[number],
        )
        for number in range(len(pool.lengths))
        if pool.lengths[number] or pool.gaps[number]
    }
    owners = scheduler.prefixes.owners
    published = {
        block: owners[pool.group, block].key[1] if (pool.group, block) in owners else ()
        for block in pool.published
    }
    return PoolState(
        pool.group,
        *pool.reach,
        pool.limit,
        tuple(pool.holders),
        tuple(pool.free),
        tuple(pool.cached),
        published,
        tables,
    )


def violations(state: Snapshot) -> list[str]:
    """Every invariant that does not hold, in words."""
    return [*_of_texts(state), *(found for pool in state.pools for found in _of_pool(state, pool))]


def _of_texts(state: Snapshot) -> Iterator[str]:
    live = [text.number for text in state.texts if text.running]
    if state.both:
        yield "a task waits and runs at once"
    if len(set(live)) < len(live):
        yield "two texts have one number"
    if sorted([*live, *state.spare, *state.lent]) != list(range(state.count)):
        spare = f"{list(state.spare)} spare and {list(state.lent)} lent"
        yield f"numbers {live} are used, {spare}, of {state.count}"
    for text in state.texts:
        if not 0 <= text.computed <= len(text.tokens):
            yield f"of {len(text.tokens)} tokens {text.computed} are computed"
        if not text.running and (text.number >= 0 or text.computed or text.answered):
            yield f"a text that waits holds number {text.number} and {text.computed} tokens"
        if text.running and text.answered != (text.computed == len(text.tokens)):
            yield f"text {text.number} has all its tokens computed and no answer, or an answer too early"


def _of_pool(state: Snapshot, pool: PoolState) -> Iterator[str]:
    total, name = len(pool.holders), f"pool {pool.group}"
    held = {block for block, count in enumerate(pool.holders) if count}
    if sorted([*pool.free, *pool.cached, *held]) != list(range(total)):
        yield f"{name}: free, cached and held blocks are not each block once"
    if pool.limit is not None and total > pool.limit:
        yield f"{name}: {total} blocks of at most {pool.limit}"
    counted = Counter(block for table in pool.tables.values() for block in table.held)
    if any(counted[block] != count for block, count in enumerate(pool.holders)):
        yield f"{name}: holders are counted wrong"
    if not set(pool.cached) <= pool.published.keys():
        yield f"{name}: blocks are kept that nobody can find"
    if pool.published.keys() & set(pool.free):
        yield f"{name}: blocks can be found that are free"
    live = {text.number: text for text in state.texts if text.running}
    strange = pool.tables.keys() - live.keys() - set(state.lent)
    if strange:
        yield f"{name}: sequences {sorted(strange)} hold blocks of no text"
    for number, text in live.items():
        yield from _of_table(f"{name}, text {number}", text, pool)


def _of_table(name: str, text: TextState, pool: PoolState) -> Iterator[str]:
    table = pool.tables.get(text.number, Table((), 0, ()))
    if table.length + table.evicted != text.computed:
        gone = f" after {table.evicted} that were given up" if table.evicted else ""
        yield f"{name}: {table.length} tokens have room{gone} and {text.computed} are computed"
    seen = 0 if pool.window is None else max(0, text.computed - pool.window + 1) // BLOCK
    wanted = [place for place in range(blocks(table.length)) if place < blocks(pool.first) or place >= seen]
    if list(table.places) != wanted:
        yield f"{name}: blocks are held at {list(table.places)} and in sight at {wanted}"
    for place, block in zip(table.places, table.held, strict=True):
        tokens = text.tokens[place * BLOCK : (place + 1) * BLOCK]
        if block in pool.published and pool.published[block] != tokens:
            yield f"{name}: block {block} is known for other tokens"
