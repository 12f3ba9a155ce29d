"""H18: what a cache, blocks, chunks and fused attention change: no answer, but time and memory.

A Llama-like network with random weights, in fp32. Answers at every place are compared with those of one
pass over the whole text by the reference, as max|a - b| / max|b|; equal is within 1e-5. `paged` and `chunked`
go through the machine that serves (`runtime.TorchMachine`, and the native one where it was built): several
texts in one pool of blocks, which go on in random turns, a token each or chunks of random lengths. `flash` is
torch's flash kernel (Dao et al. 2022), which must run or raise. The scheduler answers requests that begin
alike, with too few blocks for all, so that beginnings are reused and some requests set aside.

Time per token: of the next token after n, by the serving machine with its cache, and by a pass over all n.
Of lengths n from 64 to 1024 the exponent of a power law (least squares of logarithms): flat is nearer to 0
than to 1, linear nearer to 1 than to 0 or 2. Memory: blocks that one text holds, by length, for four kinds of
attention; and the largest tensor that is made: by one pass, by its chunks, and by the flash kernel alone. A
first run looked at a pass with flash attention leaving masks out, which are whole numbers or true and false;
the kernel turns a mask into floating point, so now its own memory is that of the kernel without a mask.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from qkv import spec
from qkv.charts.pictures import Series, curves, picture
from qkv.charts.scales import Axis
from qkv.checkpoints import StoredTensor
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.judging import spread, within
from qkv.claims.models import initialised
from qkv.engine import Request
from qkv.engine.limits import Budget
from qkv.engine.scheduler import Scheduler
from qkv.families import Description
from qkv.loading import Files, Loaded
from qkv.nn import ContiguousCache, Transformer
from qkv.nn.backends import Reference
from qkv.nn.choice import use
from qkv.nn.sdpa import SDPA
from qkv.runtime import Rows
from qkv.runtime.blocks import BLOCK
from qkv.runtime.built import missing
from qkv.runtime.choice import choose
from qkv.runtime.lower import lower
from qkv.runtime.machine import Machine
from qkv.runtime.torch_machine import TorchMachine

VOCAB, HEADS, KV_HEADS, WINDOW = 256, 8, 2, 64
EQUAL = 1e-5
WAYS = ("cache", "paged", "chunked", "flash")
KINDS = ("every head its own keys", "grouped heads", "one key for all heads", f"a window of {WINDOW}")
PASSES = ("reference", "flash", "flash kernel alone", "chunked")
CHUNK = 64


def measure(run: Run) -> Figures:
    network = llama(run.generator("weights"), run.of(128, 32))
    found: Figures = {"equal": equal(run, network), "engine": served(run, network)}
    run.progress(1, 4, "equal answers")
    found["time"] = times(run, llama(run.generator("weights"), run.of(256, 32)))
    run.progress(2, 4, "time per token")
    found["cache"] = cache_curves(run)
    run.progress(3, 4, "memory of caches")
    found["passes"] = pass_curves(run, network)
    return found


def llama(
    generator: torch.Generator, width: int, kv_heads: int = KV_HEADS, mask: spec.Mask = spec.Causal()
) -> Transformer:
    """Four layers, random weights that let differences through."""
    attention = spec.Attention(HEADS, kv_heads, width // HEADS, position=spec.Rotary(), mask=mask)
    layer = spec.pre_norm(attention, spec.Gated("silu", 8 * width // 3), norm=spec.RMSNorm())
    stack = spec.Stack(spec.Tokens(VOCAB, width), (layer,) * 4, spec.RMSNorm())
    return initialised(spec.Model(decoder=stack, head=spec.Language(VOCAB)), generator, residual=1).eval()


# the same answers


@torch.no_grad()
def equal(run: Run, network: Transformer) -> Figures:
    """By way and machine how far the answers are from those of one pass; None where it cannot be had."""
    rows, length = run.of(4, 2), run.of(200, 40)
    texts = torch.randint(VOCAB, (rows, length), generator=run.generator("texts"))
    use(network, Reference())
    whole = network(texts)
    use(network, SDPA())
    turns = np.random.default_rng(run.number("turns") % 2**32)
    found: Figures = {"cache": {"torch": apart(by_token(network, texts, int(turns.integers(1, 30))), whole)}}
    for way, most in (("paged", 1), ("chunked", CHUNK)):
        found[way] = {
            name: apart(in_turns(machine, texts, most, turns), whole)
            for name, machine in machines(network).items()
        }
    flash = flash_pass(network, texts)
    found["flash"] = {"torch": None if flash is None else apart(flash, whole)}
    return found


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def by_token(network: Transformer, texts: Tensor, prompt: int) -> Tensor:
    """A prompt at once and then token by token, with a cache in one piece."""
    cache = ContiguousCache(network.spec.trunk, *texts.shape)
    parts = [texts[:, :prompt], *texts[:, prompt:].split(1, 1)]
    return torch.cat([network(part, cache=cache) for part in parts], 1)


def machines(network: Transformer) -> dict[str, Machine]:
    found: dict[str, Machine] = {"torch": TorchMachine(network)}
    if missing() is None:
        from qkv.runtime.native import Native

        found["native"] = Native(lower(network.spec), stored(network), threads=1)
    return found


def stored(network: Transformer) -> dict[str, StoredTensor]:
    values = {name: parameter.detach().numpy() for name, parameter in network.named_parameters()}
    return {name: StoredTensor.from_array(name, array) for name, array in values.items()}


def in_turns(machine: Machine, texts: Tensor, most: int, turns: np.random.Generator) -> Tensor:
    """Each step some texts go on, by up to `most` tokens; the answers of all, in their places."""
    given, done = texts.tolist(), [0] * len(texts)
    answers = torch.zeros(*texts.shape, machine.width)
    while min(done) < texts.shape[1]:
        left = [row for row, at in enumerate(done) if at < texts.shape[1]]
        parts = []
        for row in sorted(turns.choice(left, turns.integers(1, len(left) + 1), replace=False).tolist()):
            end = min(texts.shape[1], done[row] + int(turns.integers(1, most + 1)))
            parts.append((row, done[row], end))
            done[row] = end
        step = Rows.together(*(Rows.of(given[row][at:end], at, row) for row, at, end in parts))
        logits, read = torch.from_numpy(machine.step(step)), 0
        for row, at, end in parts:
            answers[row, at:end] = logits[read : read + end - at]
            read += end - at
    return answers


@torch.no_grad()
def flash_pass(network: Transformer, texts: Tensor, last_only: bool = False) -> Tensor | None:
    """None where torch has no such kernel here."""
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return network(texts, last_only=last_only)
    except RuntimeError:
        return None


def served(run: Run, network: Transformer) -> Figures:
    """Greedy answers of the scheduler against those without any cache, and what it did on the way."""
    prompts, new = prompts_of(run), run.of(24, 6)
    source = Files(
        Path("llama"), Description(network.spec, {n: n for n in network.spec.weights()}), stored(network)
    )
    machine = TorchMachine(network)
    serve = Scheduler(Loaded(source, choose("torch", network.spec)), machine, Budget(None, 400))
    for pool in machine.own:
        pool.limit = 2 * (-(-(len(prompts[0]) + new) // BLOCK)) + 2  # two fit, with a little for a third
    tasks = [serve.submit(Request(tuple(prompt), new, ignore_eos=True)) for prompt in prompts]
    while serve.step():
        pass
    wrong = 0
    for prompt, task in zip(prompts, tasks, strict=True):
        got = next(completion.tokens for _, _, completion in reversed(task.said) if completion.tokens)
        wrong += sum(a != b for a, b in zip(got, greedily(network, prompt, new), strict=True))
    return {
        "tokens": new * len(prompts),
        "wrong": wrong,
        "reused": serve.reused,
        "set_aside": serve.preempted,
    }


def prompts_of(run: Run) -> list[list[int]]:
    """Eight that begin alike and then differ."""
    drawn = run.generator("prompts")
    common = torch.randint(VOCAB, (run.of(40, 20),), generator=drawn).tolist()
    return [[*common, *torch.randint(VOCAB, (15,), generator=drawn).tolist()] for _ in range(run.of(8, 4))]


@torch.no_grad()
def greedily(network: Transformer, prompt: Sequence[int], count: int) -> list[int]:
    """The whole text again for each token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(network(torch.tensor([ids]), last_only=True)[0, -1].argmax()))
    return ids[len(prompt) :]


# time


def times(run: Run, network: Transformer) -> Figures:
    """Seconds of the next token by length, the least of several."""
    lengths, again = run.of((64, 128, 256, 512, 1024), (16, 32)), run.of(8, 1)
    ids = torch.randint(VOCAB, (max(lengths) + again + 1,), generator=run.generator("timed")).tolist()
    found: Figures = {"lengths": list(lengths), "cached": [], "whole": []}
    for length in lengths:
        machine = TorchMachine(network)
        machine.step(Rows.of(ids[:length], 0, 0, [length - 1]))
        nexts = [
            seconds(partial(machine.step, Rows.of(ids[at : at + 1], at)))
            for at in range(length, length + again + 1)
        ]
        text = torch.tensor([ids[:length]])
        wholes = [seconds(partial(whole_pass, network, text)) for _ in range(run.of(4, 1))]
        found["cached"].append(min(nexts))
        found["whole"].append(min(wholes))
    return found


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@torch.no_grad()
def whole_pass(network: Transformer, text: Tensor) -> Tensor:
    return network(text, last_only=True)


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the power of x that y is nearest to."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


# memory


def cache_curves(run: Run) -> Figures:
    """Bytes that one text holds, as it comes by 16 tokens, for each kind of attention; and in one piece."""
    lengths = list(range(BLOCK // 2, run.of(1024, 144) + 1, BLOCK))
    width = 8 * HEADS
    seen = spec.Causal() & spec.Window(WINDOW)
    networks = (
        llama(run.generator("weights"), width, HEADS),
        llama(run.generator("weights"), width, KV_HEADS),
        llama(run.generator("weights"), width, 1),
        llama(run.generator("weights"), width, KV_HEADS, seen),
    )
    found: Figures = {"lengths": lengths, "token": {}, "held": {}}
    for name, network in zip(KINDS, networks, strict=True):
        machine = TorchMachine(network)
        found["held"][name] = list(held(machine, lengths))
        found["token"][name] = machine.bytes_for(BLOCK) / BLOCK
    return found


def held(machine: TorchMachine, lengths: Sequence[int]) -> Iterator[int]:
    """After each of these lengths; what no later query sees is handed back, as the scheduler does."""
    at = 0
    for length in lengths:
        for pool in machine.own:
            pool.hand_back(0, at)
        machine.step(Rows.of([token % VOCAB for token in range(at, length)], at, 0, []))
        yield sum(len(pool.held(0)) * pool.bytes for pool in machine.own)
        at = length


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made while this is on."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return made


def pass_curves(run: Run, network: Transformer) -> Figures:
    """By way of passing over a text, and its length: the largest tensor, in bytes. None: no flash kernel."""
    lengths = run.of((256, 512, 1024, 2048), (64, 128))
    found: Figures = {"lengths": list(lengths)}
    for way in PASSES:
        sizes = [largest(network, way, length) for length in lengths]
        found[way] = None if None in sizes else sizes
    return found


@torch.no_grad()
def largest(network: Transformer, way: str, length: int) -> int | None:
    text = torch.arange(length)[None] % VOCAB
    use(network, Reference() if way == "reference" else SDPA())
    chunked = way == "chunked"
    cache = ContiguousCache(network.spec.trunk, 1, length) if chunked else None
    made: Tensor | None = text
    with Largest() as seen:
        if way == "flash":
            made = flash_pass(network, text, last_only=True)
        elif way == "flash kernel alone":
            made = flash_kernel(network.spec.trunk.width, length)
        else:
            for part in text.split(CHUNK if chunked else length, 1):
                network(part, cache=cache, last_only=True)
    use(network, SDPA())
    return None if made is None else seen.bytes


def flash_kernel(width: int, length: int) -> Tensor | None:
    """Causal attention as the kernel does it itself, without a mask that says so."""
    query = torch.zeros(1, HEADS, length, width // HEADS)
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(query, query, query, is_causal=True)
    except RuntimeError:
        return None


# judging


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    return (
        *(same(figures, way) for way in WAYS),
        same_when_served(figures),
        *of_time([each["time"] for each in figures]),
        *of_cache([each["cache"] for each in figures]),
        *of_passes([each["passes"] for each in figures]),
    )


def same(figures: Sequence[Figures], way: str) -> Check:
    what = f"{way}: answers equal those of one pass of the reference, within {EQUAL:g}"
    found = [each["equal"][way] for each in figures]
    if any(value is None for one in found for value in one.values()):
        return Check(what, "not measured: torch has no flash kernel for this machine", False)
    most = [max(one.values()) for one in found]
    words = f"{spread(most, '.1e')} apart ({' and '.join(found[0])})"
    return Check(what, words, all(value <= EQUAL for value in most))


def same_when_served(figures: Sequence[Figures]) -> Check:
    found = [each["engine"] for each in figures]
    wrong, tokens, reused, aside = (
        sum(one[name] for one in found) for name in ("wrong", "tokens", "reused", "set_aside")
    )
    return Check(
        "the scheduler, reusing beginnings and setting requests aside, chooses the same tokens",
        f"{wrong:,} of {tokens:,} differ; {reused:,} tokens reused, {aside:,} times set aside",
        wrong == 0 and all(one["reused"] and one["set_aside"] for one in found),
    )


def of_time(found: Sequence[Figures]) -> tuple[Check, ...]:
    cached, whole = ([exponent(one["lengths"], one[way]) for one in found] for way in ("cached", "whole"))
    return (
        within(
            "time per token with a cache is flat: exponent of length under 0.5", cached, high=0.5, form=".2f"
        ),
        within("without one it is linear: exponent of length 0.5 to 1.5", whole, 0.5, 1.5, ".2f"),
    )


def of_cache(found: Sequence[Figures]) -> tuple[Check, ...]:
    over, shares, windows = [], [], []
    for one in found:
        own, grouped, single, near = (one["held"][name] for name in KINDS)
        exact = [length * one["token"][KINDS[0]] for length in one["lengths"]]
        block = BLOCK * one["token"][KINDS[0]]
        over += [(size - least) / block for size, least in zip(own, exact, strict=True)]
        shares += [
            max(abs(b / a * HEADS / n - 1) for a, b in zip(own, part, strict=True))
            for n, part in ((KV_HEADS, grouped), (1, single))
        ]
        windows.append(max(near) / (BLOCK * one["token"][KINDS[3]]))
    return (
        Check(
            "the cache grows linearly: in blocks less than a block above what its tokens take",
            f"{min(over):.2f} to {max(over):.2f} blocks above",
            all(0 <= each < 1 for each in over),
        ),
        Check(
            f"{KV_HEADS} and 1 key/value heads of {HEADS} keep {KV_HEADS}/{HEADS} and 1/{HEADS} of it",
            f"{100 * max(shares):.2g} % off at most",
            max(shares) < 1e-9,
        ),
        within(
            f"a window of {WINDOW} keeps at most {WINDOW // BLOCK + 2} blocks, however long the text",
            windows,
            high=WINDOW // BLOCK + 2,
            form=".0f",
            unit=" blocks",
        ),
    )


def of_passes(found: Sequence[Figures]) -> tuple[Check, ...]:
    def of(way: str) -> list[float | None]:
        return [None if one[way] is None else exponent(one["lengths"], one[way]) for one in found]

    none = "not measured: torch has no flash kernel for this machine"
    linear = "the largest tensor grows linearly: exponent of length under 1.5"
    return (
        within(
            "one pass of the reference: the largest tensor grows with the square: exponent over 1.5",
            of("reference"),
            low=1.5,
            form=".2f",
        ),
        within(
            f"the flash kernel alone: {linear}", of("flash kernel alone"), high=1.5, form=".2f", none=none
        ),
        within(f"one pass with it, masks included: {linear}", of("flash"), high=1.5, form=".2f", none=none),
        within(f"chunks of {CHUNK}, masks included: {linear}", of("chunked"), high=1.5, form=".2f"),
    )


def draw(figures: Sequence[Figures]) -> Pictures:
    timed, kept, passed = ([each[part] for each in figures] for part in ("time", "cache", "passes"))
    by_time = [
        Series(name, timed[0]["lengths"], [[1000 * s for s in one[key]] for one in timed])
        for key, name in (("cached", "with a cache"), ("whole", "all tokens again"))
    ]
    by_length = [
        Series(name, kept[0]["lengths"], [[b / 1024 for b in one["held"][name]] for one in kept])
        for name in KINDS
    ]
    of_pass = [
        Series(way, passed[0]["lengths"], [[size / 2**20 for size in one[way]] for one in passed])
        for way in PASSES
        if all(one[way] is not None for one in passed)
    ]
    tokens = Axis("tokens before", log=True)
    return {
        "time": picture(curves("Time of the next token", by_time, tokens, Axis("ms", log=True))),
        "cache": picture(curves("What a cache holds", by_length, Axis("tokens"), Axis("KiB"))),
        "passes": picture(
            curves("Largest tensor of a pass", of_pass, Axis("tokens", log=True), Axis("MiB", log=True))
        ),
    }
