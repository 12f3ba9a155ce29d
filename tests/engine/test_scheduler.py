"""The scheduler under any load: each answer is the one it has alone, and nothing is lost or held too long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from qkv.engine import BeamSearch, Completion, Request, Sampling, scheduler as module
from qkv.engine.drafting import Drafted, Paying
from qkv.engine.limits import Budget
from qkv.engine.scheduler import Scheduler
from qkv.engine.snapshot import Snapshot, snapshot, violations
from qkv.engine.speculation import NGrams
from qkv.engine.tasks import Task
from qkv.errors import CapacityError
from qkv.loading import Loaded
from qkv.runtime import Rows
from qkv.runtime.built import missing
from qkv.runtime.compression import HeavyHitters, SnapKV, Weighing
from qkv.runtime.lower import lower
from qkv.runtime.machine import Machine
from qkv.runtime.native import Native
from qkv.runtime.torch_machine import TorchMachine
from qkv.spec import (
    Causal,
    Dense,
    Everything,
    Language,
    Mask,
    Model as Spec,
    RMSNorm,
    Rotary,
    Stack,
    Streaming,
    Tokens,
    Window,
    pre_norm,
)
from qkv.spec.attention import Attention
from tests.engine.tiny import tiny

WORDS = 40  # tokens that prompts are made of: few, so that answers repeat themselves and guesses are right


def described(*sights: Mask) -> Spec:
    layers = tuple(
        pre_norm(Attention(2, 2, 6, position=Rotary(), mask=Causal() & sight), Dense("relu", 20))
        for sight in sights
    )
    return Spec(decoder=Stack(Tokens(266, 16), layers, RMSNorm()), head=Language(266))


KINDS = {
    "full": described(Everything(), Everything()),
    "window": described(Everything(), Window(20), Window(20)),
    "windows only": described(Window(9), Window(30)),
    "streaming": described(Streaming(3, 20), Streaming(20, 9)),
    "h2o": described(Everything(), Everything()),
    "snapkv": described(Everything(), Everything()),
}
POLICIES: dict[str, Weighing] = {"h2o": HeavyHitters(21, 10), "snapkv": SnapKV(24, 5, 3)}


@cache
def loaded(kind: str) -> Loaded:
    return tiny(described=KINDS[kind], seed=5).loaded


@cache
def machine(kind: str, runtime: str) -> Machine:
    """Shared by all tests: that nothing of one is left for the next is what they check."""
    of = loaded(kind)
    if runtime == "torch":
        return TorchMachine(of.model, policy=POLICIES.get(kind))
    values = dict(of.files.tensors)
    return Native(lower(KINDS[kind]), values, threads=2, cache_type="bf16")


RUNTIMES = ["torch", *(["native"] if missing() is None else [])]


def serving(kind: str, runtime: str, **limits: int) -> Scheduler:
    """A scheduler with a cache of its own size, on a machine that holds nothing."""
    made = machine(kind, runtime)
    for number in range(max(len(pool.lengths) for pool in made.own)):
        made.forget(number)
    for pool in made.own:
        for held in (pool.holders, pool.free, pool.cached, pool.published):
            held.clear()
    found = Scheduler(loaded(kind), made, Budget(None, 400))
    for pool in made.own:
        pool.limit, pool.keep = limits.get("blocks"), limits.get("keep")
    return found


def alone(kind: str, runtime: str, request: Request) -> list[Completion]:
    """All answers of a request that has the machine to itself, in one pass and one token at a time."""
    key = (kind, runtime, repr(request))
    if key not in _alone:
        serve = serving(kind, runtime)
        task = serve.submit(request, shares=False)
        while serve.step():
            pass
        _alone[key] = results(task)
    return _alone[key]


_alone: dict[Any, list[Completion]] = {}


def results(task: Task) -> list[Completion]:
    found = {which: completion for which, _, completion in task.said}
    return [found[which] for which in sorted(found)]


def assert_same(found: Sequence[Completion], wanted: Sequence[Completion], exact: bool) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert (one.tokens, one.text, one.finish_reason) == (other.tokens, other.text, other.finish_reason)
        if exact:
            assert one.logprobs == other.logprobs
        else:
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@dataclass
class Load:
    """Requests that come, and some that are called off, at any time."""

    serve: Scheduler
    random: Random
    requests: list[tuple[Request, str, bool]]  # with a salt, and whether to guess
    cancels: float = 0.0
    came: list[tuple[Request, Task, bool]] = field(default_factory=list)
    states: list[Snapshot] = field(default_factory=list)

    def run(self) -> None:
        left = list(self.requests)
        for _ in range(10_000):
            while left and self.random.random() < 0.4:
                request, salt, guess = left.pop()
                guesser = NGrams if guess else None
                self.came.append((request, self.serve.submit(request, salt, guesser=guesser), False))
            if self.came and self.random.random() < self.cancels:
                at = self.random.randrange(len(self.came))
                request, task, _ = self.came[at]
                if not task.finished:
                    self.serve.cancel(task)
                    self.came[at] = request, task, True
            ran = self.serve.step()
            assert violations(snapshot(self.serve)) == []
            if not ran and not left:
                return
        raise AssertionError("the scheduler does not come to an end")


prompts = st.builds(
    lambda common, length, seed: [
        *range(3, 3 + common),
        *np.random.default_rng(seed).integers(3, 3 + WORDS, length).tolist(),
    ],
    st.sampled_from([0, 16, 40, 41]),
    st.integers(1, 60),
    st.integers(0, 5),
)
samplings = st.sampled_from([Sampling(), Sampling(1.0, seed=3), Sampling(0.7, top_k=4, seed=9)])
requests = st.one_of(
    st.builds(
        lambda prompt, new, sampling, n: Request(tuple(prompt), new, sampling, ignore_eos=True, n=n),
        prompts,
        st.integers(1, 30),
        samplings,
        st.sampled_from([1, 1, 1, 3]),
    ),
    st.builds(
        lambda prompt, new: Request(tuple(prompt), new, beams=BeamSearch(3), n=2), prompts, st.integers(1, 12)
    ),
)
loads = st.lists(
    st.tuples(requests, st.sampled_from(["", "", "other"]), st.booleans()), min_size=1, max_size=9
)


@pytest.mark.parametrize(
    ("runtime", "kind"), [(r, k) for r in RUNTIMES for k in KINDS if r == "torch" or k not in POLICIES]
)
@settings(max_examples=25, deadline=None)
@given(
    asked=loads,
    seed=st.integers(0, 999),
    blocks=st.sampled_from([None, 24, 30, 60]),
    keep=st.sampled_from([None, 8]),
    cancels=st.sampled_from([0.0, 0.1]),
    chunk=st.sampled_from([7, 32, 512]),
)
def test_any_load_gives_what_each_gives_alone(
    runtime: str,
    kind: str,
    asked: list[tuple[Request, str, bool]],
    seed: int,
    blocks: int | None,
    keep: int | None,
    cancels: float,
    chunk: int,
) -> None:
    wanted = [alone(kind, runtime, request) for request, _, _ in asked]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        serve = serving(kind, runtime, blocks=blocks, keep=keep)
        load = Load(serve, Random(seed), asked, cancels)
        load.run()
    by_request = {id(request): found for (request, _, _), found in zip(asked, wanted, strict=True)}
    for request, task, cancelled in load.came:
        assert task.finished and task.problem is None
        if not cancelled:
            assert_same(results(task), by_request[id(request)], exact=runtime == "native")
    for pool in serve.machine.own:
        assert not any(pool.holders)
        assert sorted([*pool.free, *pool.cached]) == list(range(len(pool.holders)))
    assert serve.idle and not serve.step()


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, 3 + WORDS, length).tolist())


def finish(serve: Scheduler) -> int:
    steps = 0
    while serve.step():
        steps += 1
    return steps


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_common_beginning_is_computed_once(runtime: str) -> None:
    serve, rows = serving("full", runtime), list[int]()
    inner = serve.machine.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve.machine, "run", lambda given: rows.append(len(given.tokens)) or inner(given))
        for last in (5, 6, 5):
            serve.submit(Request((*prompt_of(100), last), 1))
            finish(serve)
    # 101 tokens have six full blocks; of 97 tokens only five blocks may be found, as the last is computed
    assert rows == [101, 5, 5] and serve.reused == 2 * 96
    serve.submit(Request(prompt_of(96), 1))
    finish(serve)
    assert serve.reused == 2 * 96 + 80


def test_other_salts_share_nothing() -> None:
    serve = serving("full", "torch")
    for salt in ("a", "b", "a"):
        serve.submit(Request(prompt_of(64), 1), salt)
        finish(serve)
    assert serve.reused == 48


def test_who_runs_shares_with_who_comes() -> None:
    serve = serving("full", "torch")
    first = serve.submit(Request(prompt_of(64), 50, ignore_eos=True))
    serve.step()
    serve.submit(Request(prompt_of(64), 2, ignore_eos=True))
    serve.step()
    (pool,) = serve.machine.own
    assert serve.reused == 48 and sorted(pool.holders)[-3:] == [2, 2, 2]
    serve.cancel(first)
    finish(serve)
    assert not any(pool.holders) and len(pool.cached) == 4


def test_the_youngest_is_set_aside_and_the_oldest_goes_on() -> None:
    serve = serving("full", "torch", blocks=8)
    asked = [Request(prompt_of(30, seed), 60, ignore_eos=True) for seed in range(3)]
    tasks = [serve.submit(request) for request in asked]
    order = []
    while serve.step():
        order += [at for at, task in enumerate(tasks) if task.finished and at not in order]
    assert order == [0, 1, 2] and serve.preempted > 0
    for request, task in zip(asked, tasks, strict=True):
        assert_same(results(task), alone("full", "torch", request), exact=False)


def test_what_never_fits_is_refused_and_the_others_go_on() -> None:
    serve = serving("full", "torch", blocks=4)
    with pytest.raises(CapacityError, match="A cache of 65 tokens needs"):
        serve.submit(Request(prompt_of(60), 6))
    task = serve.submit(Request(prompt_of(60), 5, ignore_eos=True))
    finish(serve)
    assert len(results(task)[0].tokens) == 5


def test_window_layers_hand_back_what_is_out_of_sight() -> None:
    serve = serving("windows only", "torch")
    task = serve.submit(Request(prompt_of(200), 100, ignore_eos=True))
    while not task.answered:
        serve.step()
    most = [0, 0]
    while serve.step():
        most = [max(n, sum(map(bool, pool.holders))) for n, pool in zip(most, serve.machine.own, strict=True)]
    assert most == [2, 3]  # 9 and 30 tokens, which begin and end anywhere in blocks of 16
    assert [pool.reach.window for pool in serve.machine.own] == [9, 30]


def test_less_than_a_block_of_a_text_is_wasted() -> None:
    serve = serving("full", "torch")
    lengths = [1, 15, 16, 17, 100]
    tasks = [serve.submit(Request(prompt_of(n, n), 40, ignore_eos=True)) for n in lengths]
    while not all(task.answered for task in tasks):
        serve.step()
    (pool,) = serve.machine.own
    for task in tasks:
        (text,) = task.alive()
        assert 0 <= 16 * len(pool.held(text.number)) - text.computed < 16


def test_a_prompt_is_shared_by_its_answers() -> None:
    serve = serving("full", "torch")
    task = serve.submit(Request(prompt_of(40), 4, Sampling(1.0, seed=1), ignore_eos=True, n=5))
    serve.step(), serve.step()
    (pool,) = serve.machine.own
    # two full blocks of the prompt are held by all five, each has a third of its own
    assert sorted(count for count in pool.holders if count) == [1, 1, 1, 1, 1, 5, 5]
    finish(serve)
    assert len(results(task)) == 5


def test_guesses_change_no_token_and_save_steps() -> None:
    """A model that repeats itself: random weights with greedy choice end in a cycle."""
    request = Request(prompt_of(20), 200, ignore_eos=True)
    (plain,) = alone("full", "torch", request)
    serve = serving("full", "torch")
    task = serve.submit(request, guesser=NGrams)
    steps = finish(serve)
    (found,) = results(task)
    assert found.tokens == plain.tokens and found.text == plain.text
    assert found.guessed >= found.right > 50 and steps < 150


def test_guesses_that_are_wrong_are_given_up() -> None:
    serve = serving("full", "torch")
    speculation = NGrams()
    request = Request(prompt_of(20), 200, Sampling(2.0, seed=4), ignore_eos=True)
    task = serve.submit(request, guesser=lambda: speculation)
    finish(serve)
    assert results(task)[0].tokens == alone("full", "torch", request)[0].tokens
    assert speculation.guessed - speculation.right < 20


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seed", [5, 6], ids=["the same weights", "other weights"])
def test_another_model_may_draft(sampling: Sampling, seed: int) -> None:
    """Of the same weights, all that a greedy text guesses is right."""
    drafter = Scheduler(
        tiny(seed=seed).loaded, TorchMachine(tiny(described=KINDS["full"], seed=seed).network), Budget(None)
    )
    request = Request(prompt_of(20), 60, sampling, ignore_eos=True)
    (plain,) = alone("full", "torch", request)
    serve, guesses = serving("full", "torch"), Drafted(drafter)
    guesses.paying = Always()
    task = serve.submit(request, guesser=lambda: guesses)
    steps = 0
    while serve.step():
        steps += 1
        assert violations(snapshot(serve)) == violations(snapshot(drafter)) == []
    (found,) = results(task)
    assert found.tokens == plain.tokens and found.guessed >= found.right
    if seed == 5 and sampling.temperature == 0:
        assert found.right == found.guessed and steps < 20
    assert drafter.idle and not drafter.lent and not any(drafter.machine.own[0].holders)


def test_a_drafter_whose_cache_is_held_by_its_guests_says_so() -> None:
    serve = serving("full", "torch", blocks=4)
    number = serve.lend()
    serve.run_for(Rows.of(list(prompt_of(40)), sequence=number))
    task = serve.submit(Request(prompt_of(30), 4))
    assert not serve.step() and task.finished and isinstance(task.problem, CapacityError)
    serve.end_loan(number)
    assert violations(snapshot(serve)) == []
    again = serve.submit(Request(prompt_of(30), 4, ignore_eos=True))
    finish(serve)
    assert len(results(again)[0].tokens) == 4


class Always(Paying):
    def ask(self, tokens: int) -> bool:
        return True


def test_guesses_are_given_up_where_they_do_not_pay() -> None:
    """By the clock: a step is a second, and with guesses two, which give one token as without."""
    assert share_of_guesses(gain=1) < 0.05
    assert share_of_guesses(gain=3) > 0.95


def share_of_guesses(gain: int) -> float:
    now, tokens, guessing = [0.0], 0, list[bool]()
    paying = Paying(lambda: now[0])
    while len(guessing) < 2000:
        guessing.append(paying.ask(tokens))
        now[0] += 2.0 if guessing[-1] else 1.0
        tokens += gain if guessing[-1] else 1
    return sum(guessing[100:]) / 1900


# The validator finds what is wrong


def broken() -> Snapshot:
    serve = serving("window", "torch")
    for seed in range(2):
        serve.submit(Request(prompt_of(60, seed), 9, ignore_eos=True))
    serve.step(), serve.step()
    state = snapshot(serve)
    assert violations(state) == []
    return state


def with_pool(state: Snapshot, **changed: Any) -> Snapshot:
    return replace(state, pools=(replace(state.pools[0], **changed), *state.pools[1:]))


def test_the_validator_finds_each_kind_of_fault() -> None:
    state = broken()
    pool, text = state.pools[0], state.texts[0]
    table = pool.tables[0]
    cases = {
        "not each block once": with_pool(state, free=(*pool.free, 0)),
        "at most 2": with_pool(state, limit=2),
        "counted wrong": with_pool(state, holders=(2, *pool.holders[1:])),
        "nobody can find": with_pool(
            state,
            cached=(7,),
            holders=(*pool.holders[:7], 0, *pool.holders[8:]),
            published={b: t for b, t in pool.published.items() if b != 7},
        ),
        "hold blocks of no text": with_pool(state, tables={**pool.tables, 9: table}),
        "are computed": with_pool(state, tables={**pool.tables, 0: replace(table, length=16)}),
        "known for other tokens": with_pool(state, published={**pool.published, table.held[0]: (1,) * 16}),
        "in sight at": replace(
            state, pools=(pool, replace(state.pools[1], tables={**state.pools[1].tables, 0: table}))
        ),
        "two texts have one number": replace(state, texts=(text, text)),
        "spare": replace(state, count=5),
        "waits and runs": replace(state, both=1),
        "holds number": replace(state, texts=(replace(text, running=False), *state.texts[1:])),
        "too early": replace(state, texts=(replace(text, answered=True), *state.texts[1:])),
    }
    for part, wrong in cases.items():
        assert any(part in found for found in violations(wrong)), part


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_ten_thousand_requests_leave_nothing(runtime: str) -> None:
    """Of mixed lengths, half of which begin alike, some called off; who comes first is served first."""
    random, serve = Random(1), serving("window", runtime, blocks=60, keep=40)
    begun: list[Task] = []
    left, sizes = 10_000 if runtime == "native" else 1_000, list[int]()
    while left or not serve.idle:
        while left and len(serve.waiting) < 20:
            left -= 1
            common = range(3, 3 + 33) if random.random() < 0.5 else ()
            request = Request(
                (*common, *prompt_of(random.randint(1, 50), left)),
                random.randint(1, 12),
                Sampling(1.0, seed=left) if left % 3 else Sampling(),
                ignore_eos=True,
                n=3 if left % 50 == 0 else 1,
            )
            begun.append(serve.submit(request, guesser=NGrams if left % 4 == 0 else None))
        if random.random() < 0.02 and begun:
            serve.cancel(random.choice(begun))
        serve.step()
        # who came first is at work, or done
        oldest = next((task for task in begun if not task.finished), None)
        assert oldest is None or oldest.running or oldest is serve.waiting[0]
        if serve.steps % 97 == 0:
            assert violations(snapshot(serve)) == []
            begun = [task for task in begun if not task.finished]
            sizes.append(len(serve.prefixes.nodes))
    assert violations(snapshot(serve)) == [] and serve.preempted > 0 and serve.reused > 0
    for pool in serve.machine.own:
        assert not any(pool.holders) and len(pool.holders) <= 60
    assert max(sizes) <= 120 and serve._count <= 256
