"""H25: what a layer of width 128 costs by length: its scores, its attention in all, its feed-forward.

Operations are counted by torch's own counter as the reference runs, and compared with those that the
description promises. Times are of the same parts, the least of several rounds, in turn. Nothing is masked:
the count of 4 n d a token for scores and mixing supposes that every token sees every other. A first run
began at 64 tokens, where attention already took longer than the feed-forward; now it begins at 16.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch.utils.flop_counter import FlopCounterMode

from qkv import spec
from qkv.charts.pictures import Series, curves, picture
from qkv.charts.scales import Axis
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.judging import spread, within
from qkv.claims.models import initialise
from qkv.nn import Layout
from qkv.nn.attention import Attention
from qkv.nn.backends import Reference
from qkv.nn.feed_forward import Dense

WIDTH, HEADS = 128, 4
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
PARTS = ("scores", "attention", "feed-forward")  # scores: with softmax and mixing; attention: with its maps
NOWHERE = "at no length measured"
TWICE = 2.0  # "near" for times, as hardware shifts them


def measure(run: Run) -> Figures:
    lengths = run.of(LENGTHS, LENGTHS[2:6])
    rounds = run.of(15, 2)
    node = spec.Attention(HEADS, HEADS, WIDTH // HEADS, mask=spec.Everything())
    mixer = spec.Dense("gelu", 4 * WIDTH)
    promised = spec.pre_norm(node, mixer)
    attention, feed_forward = Attention(node, WIDTH), Dense(mixer, WIDTH)
    for module in (attention, feed_forward):
        initialise(module, run.generator("weights"))
    found: Figures = {"lengths": list(lengths), "promised": [], "counted": {}, "seconds": {}}
    for part in PARTS:
        found["counted"][part], found["seconds"][part] = [], []
    for place, length in enumerate(lengths):
        x = torch.randn(1, length, WIDTH, generator=run.generator("inputs"))
        calls = parts_of(attention, feed_forward, x)
        times = least_seconds(calls, rounds)
        for part, call in calls.items():
            found["counted"][part].append(operations(call))
            found["seconds"][part].append(times[part])
        found["promised"].append(promised.flops(WIDTH, length))
        run.progress(place + 1, len(lengths), f"{length:,} tokens")
    return found


def parts_of(attention: Attention, feed_forward: Dense, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    layout = Layout.unpadded(1, x.shape[1])
    query, key, value = attention.as_queries(x), attention.as_keys(x), attention.as_values(x)
    visible = layout.visible(attention.node.mask)
    return {
        "scores": lambda: Reference().attend(query, key, value, visible, attention.node.score),
        "attention": lambda: attention(x, layout),
        "feed-forward": lambda: feed_forward(x),
    }


@torch.no_grad()
def least_seconds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The least of so many rounds, each part in turn, so that what disturbs one disturbs all."""
    found = dict.fromkeys(calls, math.inf)
    for _ in range(rounds + 1):  # the first warms up
        for part, call in calls.items():
            start = time.perf_counter()
            call()
            found[part] = min(found[part], time.perf_counter() - start)
    return found


@torch.no_grad()
def operations(call: Callable[[], object]) -> int:
    counter = FlopCounterMode(display=False)
    with counter:
        call()
    return counter.get_total_flops()


def crossing(lengths: Sequence[float], rising: Sequence[float], other: Sequence[float]) -> float | None:
    """Where the first comes to exceed the second, between lengths on logarithmic scales; None: nowhere."""
    apart = [math.log(one / two) for one, two in zip(rising, other, strict=True)]
    for place in range(1, len(apart)):
        before, after = apart[place - 1], apart[place]
        if before < 0 <= after:
            low, high = math.log(lengths[place - 1]), math.log(lengths[place])
            return math.exp(low + (high - low) * -before / (after - before))
    return None


def crossings(figures: Sequence[Figures], of: str, part: str) -> list[float | None]:
    return [crossing(each["lengths"], each[of][part], each[of]["feed-forward"]) for each in figures]


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    exact = [
        [
            one + two
            for one, two in zip(each["counted"]["attention"], each["counted"]["feed-forward"], strict=True)
        ]
        == each["promised"]
        for each in figures
    ]
    checks = [
        Check(
            "the operations that the description promises are those that are counted",
            f"exactly, in {sum(exact)} of {len(exact)} runs",
            all(exact),
        )
    ]
    for part, near in (("scores", 4 * WIDTH), ("attention", 2 * WIDTH)):
        checks += [
            within(
                f"by operations, {part} cost as much as the feed-forward at {near} tokens",
                crossings(figures, "counted", part),
                near - 0.5,
                near + 0.5,
                ".4g",
                " tokens",
                NOWHERE,
            ),
            within(
                f"by time, {part} cost as much as the feed-forward at {near} tokens, within a factor of two",
                crossings(figures, "seconds", part),
                near / TWICE,
                near * TWICE,
                ".0f",
                " tokens",
                NOWHERE,
            ),
        ]
    return tuple(checks)


def draw(figures: Sequence[Figures]) -> Pictures:
    lengths = figures[0]["lengths"]
    axis = Axis("tokens", log=True, ticks=lengths)

    def series(of: str, unit: float) -> list[Series]:
        return [
            Series(part, lengths, [[value / unit for value in each[of][part]] for each in figures])
            for part in PARTS
        ]

    met = spread(crossings(figures, "seconds", "scores"), ".0f", none=NOWHERE)
    return {
        "cost": picture(
            curves("Operations", series("counted", 1e6), axis, Axis("millions", log=True)),
            curves(
                f"Time; scores meet at {met}", series("seconds", 1e-3), axis, Axis("milliseconds", log=True)
            ),
        )
    }
