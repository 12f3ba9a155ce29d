"""Caches that keep less: each policy against a plain loop of its own, and the whole against none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from qkv.engine import Completion, Request
from qkv.engine.generation import scheduler
from qkv.engine.snapshot import snapshot, violations
from qkv.errors import CapacityError, RequestError, UnsupportedError
from qkv.loading import Loaded
from qkv.model import Model
from qkv.runtime import Rows
from qkv.runtime.built import missing
from qkv.runtime.choice import choose
from qkv.runtime.compression import Compression, HeavyHitters, Sinks, SnapKV, compression, described
from qkv.runtime.lower import lower
from qkv.runtime.machine import Machine
from qkv.runtime.native import Native
from qkv.runtime.torch_machine import TorchMachine
from qkv.spec import (
    Alibi,
    Attention,
    Buckets,
    Causal,
    Chunk,
    Dense,
    DynamicNTK,
    Language,
    LatentAttention,
    Model as Spec,
    RMSNorm,
    Rotary,
    Stack,
    Streaming,
    Tokens,
    Window,
    pre_norm,
)
from tests.engine.tiny import random_files, spec, tiny

HEADS, KV_HEADS, DIM, THETA = 4, 2, 6, 100.0  # of tests.engine.tiny.spec
TEXT = np.random.default_rng(7).integers(0, 256, 60).tolist()


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + RMSNorm().eps).sqrt()


def turned(x: torch.Tensor, at: int) -> torch.Tensor:
    """Heads (heads, dim) at a position: the first half of the dimensions with the second."""
    angles = at * THETA ** (-torch.arange(0, DIM, 2) / DIM)
    a, b = x[:, : DIM // 2], x[:, DIM // 2 :]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Plain:
    """The model of `tiny`, token by token in plain loops. `keep` mixes a query with what is kept."""

    def __init__(self, model: Model, keep: Callable[[int, Any], None], renumber: bool = False):
        self.at = {name: value.detach() for name, value in model.network.named_parameters()}
        # of each layer and head: position, key before it is turned, value, and the weight it got
        self.held: list[list[list[list[Any]]]] = [[[] for _ in range(KV_HEADS)] for _ in range(2)]
        self.keep, self.renumber = keep, renumber

    def step(self, token: int, position: int) -> np.ndarray:
        x = self.at["decoder.embedding.weight"][token]
        for layer in range(2):
            place = f"decoder.layers.{layer}"
            h = rms(x, self.at[f"{place}.attention_before.weight"])
            x = x + self.attention(h, layer, position)
            h = rms(x, self.at[f"{place}.feed_forward_before.weight"])
            inner = F.silu(self.at[f"{place}.feed_forward.gate.weight"] @ h)
            inner = inner * (self.at[f"{place}.feed_forward.up.weight"] @ h)
            x = x + self.at[f"{place}.feed_forward.down.weight"] @ inner
        return (self.at["head.weight"] @ rms(x, self.at["decoder.norm.weight"])).numpy()

    def attention(self, h: torch.Tensor, layer: int, position: int) -> torch.Tensor:
        place = f"decoder.layers.{layer}.attention"
        query, key, value = (
            (self.at[f"{place}.{name}.weight"] @ h).view(-1, DIM) for name in ("query", "key", "value")
        )
        mixed = []
        for head in range(KV_HEADS):
            held = self.held[layer][head]
            held.append([position, key[head], value[head], 0.0])
            # a policy that renumbers counts places in the cache, the other ones in the text
            places = range(len(held)) if self.renumber else [kept[0] for kept in held]
            keys = torch.cat([turned(kept[1][None], at) for kept, at in zip(held, places, strict=True)])
            group = query[head * 2 : head * 2 + 2]
            scores = turned(group, places[-1]) @ keys.T / DIM**0.5
            weights = scores.softmax(-1)
            mixed.append(weights @ torch.stack([kept[2] for kept in held]))
            for at, kept in enumerate(held):
                kept[3] = [*(kept[3] or []), (position, float(weights[:, at].sum()))]
            self.keep(position, held)
        return self.at[f"{place}.output.weight"] @ torch.cat(mixed).flatten()


def by_sinks(policy: Sinks) -> Callable[[int, Any], None]:
    def keep(position: int, held: Any) -> None:
        # what comes next makes the cache full: so many stay that it is just that
        while len(held) >= policy.budget:
            del held[policy.first]

    return keep


def got(kept: Any, of: Callable[[int], bool]) -> float:
    return sum(weight for position, weight in kept[3] if of(position))


def by_weight(policy: HeavyHitters, prompt: int) -> Callable[[int, Any], None]:
    def keep(position: int, held: Any) -> None:
        while position >= prompt - 1 and len(held) > policy.budget:
            early = held[: len(held) - policy.latest]
            least = min(early, key=lambda kept: got(kept, lambda at: True))
            held.remove(least)

    return keep


def by_last_queries(policy: SnapKV, prompt: int) -> Callable[[int, Any], None]:
    def keep(position: int, held: Any) -> None:
        if position != prompt - 1 or len(held) <= policy.budget:
            return
        early, side = held[: len(held) - policy.observed], policy.around // 2
        each = [got(kept, lambda at: prompt - policy.observed <= at < prompt) for kept in early]
        best = [max(each[max(0, i - side) : i + side + 1]) for i in range(len(each))]
        order = sorted(range(len(each)), key=lambda i: -best[i])[: policy.budget - policy.observed]
        held[:] = [early[i] for i in sorted(order)] + held[len(held) - policy.observed :]

    return keep


def machine(model: Model, policy: Compression, runtime: str) -> Machine:
    if not isinstance(policy, Sinks):
        return TorchMachine(model.network, policy=policy)
    other = random_files(described(model.spec, policy))
    if runtime == "native":
        return Native(lower(other.spec), dict(model.loaded.files.tensors), threads=1, cache_type="f32")
    other.network.load_state_dict(model.network.state_dict())
    return TorchMachine(other.network)


def answers(run: Machine, text: list[int], prompt: int, chunk: int) -> np.ndarray:
    """Logits after the prompt, read in chunks, and after each token that follows it."""
    found = []
    ends = [*range(chunk, prompt, chunk), *range(prompt, len(text) + 1)]
    for start, end in zip([0, *ends], ends, strict=False):
        total = np.full(end - start, max(prompt, end))
        rows = Rows.of(text[start:end], start=start, wanted=[end - start - 1])
        rows = Rows(rows.tokens, rows.sequences, rows.positions, rows.wanted, totals=total)
        found.append(run.step(rows)[0])
    return np.stack(found[-(len(text) - prompt + 1) :])


RUNTIMES = ["torch", *(["native"] if missing() is None else [])]
POLICIES: Mapping[str, Compression] = {
    "sinks": Sinks(12, 3),
    "one sink": Sinks(7, 1),
    "a window alone": Sinks(9, 0),
    "h2o": HeavyHitters(20, 8),
    "snapkv": SnapKV(16, 5, 3),
}


@pytest.mark.parametrize(
    ("name", "runtime"),
    [(n, r) for n, p in POLICIES.items() for r in RUNTIMES if r == "torch" or isinstance(p, Sinks)],
)
@pytest.mark.parametrize("chunk", [5, 64])
def test_a_policy_equals_its_loop(name: str, runtime: str, chunk: int) -> None:
    policy, prompt, model = POLICIES[name], 41, tiny(seed=3)
    keep: Callable[[int, Any], None]
    if isinstance(policy, Sinks):
        keep = by_sinks(policy)
    elif isinstance(policy, HeavyHitters):
        keep = by_weight(policy, prompt)
    else:
        keep = by_last_queries(policy, prompt)
    plain = Plain(model, keep, renumber=isinstance(policy, Sinks))
    wanted = np.stack([plain.step(token, at) for at, token in enumerate(TEXT)])[prompt - 1 :]
    found = answers(machine(model, policy, runtime), TEXT, prompt, chunk)
    assert np.abs(found - wanted).max() / np.abs(wanted).max() < 1e-5
    # and the policy does something
    whole = Plain(model, lambda position, held: None)
    other = np.stack([whole.step(token, at) for at, token in enumerate(TEXT)])[prompt - 1 :]
    assert np.abs(found - other).max() / np.abs(other).max() > 1e-3


def completion(model: Model, compress: Compression | None, runtime: str) -> Completion:
    files, spec = model.loaded.files, model.spec
    if compress is not None:
        spec = described(spec, compress)
        files = replace(files, description=replace(files.description, model=spec))
    loaded = Loaded(files, choose(runtime, spec), compress=compress)
    found = Model(loaded).generate(TEXT[:45], max_new_tokens=5, ignore_eos=True)
    assert isinstance(found, Completion)
    return found


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("kind", [Sinks, HeavyHitters, SnapKV])
def test_a_budget_that_holds_all_is_identical_to_none(
    kind: Callable[[int], Compression], runtime: str
) -> None:
    if runtime == "native" and kind is not Sinks:
        runtime = "torch"
    for budget in (49, 50, 400):  # of 45 + 5 tokens 49 are kept, as the last is not read again
        wanted = completion(tiny(seed=2), None, runtime)
        found = completion(tiny(seed=2), kind(budget), runtime)
        assert found.tokens == wanted.tokens and found.logprobs == wanted.logprobs
    less = completion(tiny(seed=2), kind(40), runtime)
    assert less.logprobs != wanted.logprobs


def held(compress: Compression, runtime: str, prompt: int, new: int) -> list[int]:
    """How many blocks a text holds after each step."""
    model = tiny(seed=2)
    files = model.loaded.files
    spec = described(model.spec, compress)
    files = replace(files, description=replace(files.description, model=spec))
    loaded = Loaded(files, choose(runtime, spec), compress=compress)
    serve = scheduler(loaded)
    serve.submit(Request(tuple(np.resize(TEXT, prompt).tolist()), new, ignore_eos=True))
    found = []
    while serve.step():
        assert violations(snapshot(serve)) == []
        (pool,) = serve.machine.own
        found.append(sum(map(bool, pool.holders)))
    return found


def test_what_is_given_up_is_free() -> None:
    # a window of 60 and its row begin and end anywhere in blocks of 16; 4 first tokens are in one
    assert max(held(Sinks(64), RUNTIMES[-1], 400, 100)[1:-1]) == 1 + 5
    # after the prompt, of 40 tokens and the one that is read
    assert set(held(HeavyHitters(40), "torch", 400, 100)[:-1]) == {3}
    after = held(SnapKV(40), "torch", 400, 100)[:-1]
    assert after[0] == 3 and after[-1] == -(-(40 + 98) // 16)


def test_a_long_text_fits_where_its_budget_does() -> None:
    """Of 20 + 500 tokens 64 are kept: five blocks, and the prompt's two, not 33."""
    model = tiny(seed=2)
    spec = described(model.spec, HeavyHitters(64))
    files = replace(model.loaded.files, description=replace(model.loaded.description, model=spec))
    loaded = Loaded(files, choose("torch", spec), compress=HeavyHitters(64))
    block = scheduler(loaded).machine.own[0].bytes
    loaded.cache = 5 * block
    loaded.serving.clear()
    long = Request(tuple(TEXT[:20]), 500, ignore_eos=True)
    task = scheduler(loaded).submit(long)
    while scheduler(loaded).step():
        pass
    assert task.finished and task.problem is None
    loaded.cache = 4 * block
    loaded.serving.clear()
    with pytest.raises(CapacityError, match="A cache of 519 tokens needs"):
        scheduler(loaded).submit(long)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("sinks:1024", Sinks(1024, 4)),
        ("h2o:64", HeavyHitters(64)),
        ("snapkv:2048", SnapKV(2048)),
        (None, None),
    ],
)
def test_policies_have_names(text: str | None, policy: Compression | None) -> None:
    assert compression(text) == policy


@pytest.mark.parametrize("text", ["sinks", "h20:64", "sinks:-1", "snapkv:1.5", "", 3])
def test_other_names_are_refused(text: Any) -> None:
    with pytest.raises(RequestError, match="must be a policy and a number of tokens"):
        compression(text)


@pytest.mark.parametrize(
    "make", [lambda: Sinks(4), lambda: HeavyHitters(3, 4), lambda: SnapKV(8), lambda: SnapKV(40, 8, 4)]
)
def test_budgets_that_hold_nothing_else_are_refused(make: Callable[[], Compression]) -> None:
    with pytest.raises(RequestError):
        make()


def of(*mixers: Any) -> Spec:
    layers = tuple(pre_norm(mixer, Dense("relu", 20)) for mixer in mixers)
    return Spec(decoder=Stack(Tokens(40, 16), layers, RMSNorm()), head=Language(40))


def test_layers_that_keep_less_already_stay_as_they_are() -> None:
    near, far, all_ = (Attention(2, 2, 6, mask=mask) for mask in (Window(9), Causal() & Window(90), Causal()))
    found = described(of(near, far, all_), Sinks(20, 4))
    assert found.decoder is not None
    masks = [layer.sublayers[0].branches[0].mixer.mask for layer in found.decoder.layers]  # type: ignore[union-attr]
    assert masks == [Window(9), Causal() & Streaming(4, 16), Causal() & Streaming(4, 16)]


@pytest.mark.parametrize(
    ("mixer", "policy", "what"),
    [
        (LatentAttention(2, 4, 4, 4, 8), Sinks(8), "a LatentAttention"),
        (Attention(2, 2, 6, mask=Causal() & Chunk(8)), Sinks(64), "the mask"),
        (Attention(2, 2, 6, position=Rotary(scaling=DynamicNTK(2.0, 8))), Sinks(64), "depends on the length"),
        (Attention(2, 2, 6, mask=Causal() & Window(8)), HeavyHitters(64), "the mask"),
        (Attention(2, 2, 6, position=Alibi()), SnapKV(64), "Alibi positions"),
        (Attention(2, 2, 6, position=Buckets(8, 10, False)), HeavyHitters(64), "Buckets positions"),
    ],
)
def test_what_a_policy_cannot_be_applied_to_is_named(mixer: Any, policy: Compression, what: str) -> None:
    with pytest.raises(UnsupportedError, match=f"decoder.layers.1 has .*{what}"):
        described(of(Attention(2, 2, 6), mixer), policy)


def test_what_is_weighed_runs_where_weights_can_be_had() -> None:
    policy = HeavyHitters(64)
    assert choose(None, spec(), weighs=policy.weighs).reason == "keeping by attention weights is asked for"
    assert choose(None, spec(), weighs=policy.weighs).runtime == "torch"
    with pytest.raises(RequestError, match="The native runtime has no keeping by attention weights"):
        choose("native", spec(), weighs=policy.weighs)
