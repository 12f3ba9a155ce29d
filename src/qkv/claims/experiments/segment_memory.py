"""H13: Transformer-XL against itself without its memory: on planted values, and on a long text.

Planted: random tokens, and now and then a value; of the places from 1 to 90 (in the test to 130) after it a
quarter ask for it. Those from 40 on are judged: where only they were asked in training, a sixth of it was in
one layer's reach and 340 steps taught nothing. The answer is only a target, so that no answer stands nearer
than the value. Segments and memories have 32 places and there are three layers, so N * M is 96: of a segment
and the one before it nothing is 40 back but what lies in the memory, and beyond 63 only what a layer below
has brought along. Weights start with the gain that the authors' 0.02 has at their width of 512.

The long text is Moby-Dick, else WikiText, else `data.any_text`, as characters and in order, in streams.
"Absolute" is a model with sinusoids added to the embedding, where what is remembered of a segment was made
with the numbers of its own places (section 3.2 of Dai et al. 2019); with memory and without.

Speed: processor time of one thread or two for the same tokens with 96 and more before them, once in
segments with a memory, once with a window of 128 read anew for each token, 32 windows at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv import spec
from qkv.charts.pictures import Bar, Series, bars, curves, picture
from qkv.charts.scales import Axis
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.data import Corpus, characters, there_is
from qkv.claims.judging import below, within
from qkv.claims.training import Curve, adam, cosine, train, warm_up
from qkv.lineage.transformer_xl import (
    Memory,
    Settings,
    TransformerXL,
    evaluate,
    losses,
    segments,
    streams,
)
from qkv.nn import Transformer
from qkv.nn.choice import use
from qkv.nn.sdpa import SDPA

SEGMENT, MEMORY, LAYERS, BATCH = 32, 32, 3, 32
REACH = LAYERS * MEMORY
NEAREST, FURTHEST, TESTED = 40, 90, 130
FILLERS, VALUES = 8, 8
ASK, VOCAB = FILLERS + VALUES, FILLERS + VALUES + 1
EDGES = (1, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 130)  # distances that are counted together
LONGER = 128  # places of the longer memory in evaluation
CHANCE = 1 / VALUES


class Planted(NamedTuple):
    """Streams, what is asked at each place (-1: nothing), and how far back it is."""

    tokens: Tensor
    answers: Tensor
    distances: Tensor


def planted(generator: torch.Generator, rows: int, length: int, furthest: int = FURTHEST) -> Planted:
    """A new value comes once the one before is no longer asked for, 1 to 8 places later.

    The rows are not in step: each begins anywhere in a stretch, whose value came before it and is not
    asked for.
    """
    most = length // (furthest + 1) + 3
    apart = furthest + torch.randint(1, 9, (rows, most), generator=generator)
    begun = torch.randint(furthest, (rows, 1), generator=generator)
    starts = apart.cumsum(1) - apart[:, :1] - begun
    values = torch.randint(VALUES, (rows, most), generator=generator)
    places = torch.arange(length).expand(rows, length).contiguous()
    latest = torch.searchsorted(starts, places, right=True) - 1
    distances = places - starts.gather(1, latest)
    asked = (distances >= 1) & (distances <= furthest) & (distances <= places)
    asked &= torch.rand(rows, length, generator=generator) < 0.25
    tokens = torch.randint(FILLERS, (rows, length), generator=generator)
    value = values.gather(1, latest)
    tokens = torch.where(distances == 0, FILLERS + value, tokens).masked_fill(asked, ASK)
    return Planted(tokens, value.masked_fill(~asked, -1), distances)


def measure(run: Run) -> Figures:
    return {"planted": on_planted(run), "text": on_text(run)}


def made(run: Run, vocab: int, memory: int, absolute: bool = False) -> TransformerXL:
    """A small one on torch's fused attention. Which weights it starts with depends on the run alone."""
    width = run.of(64, 16)
    settings = Settings(
        vocab=vocab,
        layers=LAYERS,
        width=width,
        heads=4,
        head_dim=width // 4,
        hidden=4 * width,
        memory=memory,
        std=0.02 * (512 / width) ** 0.5,
    )
    if absolute:
        settings = replace(settings, position=None, added=spec.Sinusoidal())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.number("weights"))
        model = TransformerXL(settings)
    use(model, SDPA())
    return model


# --- planted values ---------------------------------------------------------------------------


def on_planted(run: Run) -> Figures:
    steps = run.of(1200, 3)
    test = planted(run.generator("test"), run.of(64, 2), run.of(1024, 160), TESTED)
    found: Figures = {}
    for name, memory in (("vanilla", 0), ("XL", MEMORY)):
        model = made(run, VOCAB, memory)
        rows = planted(run.generator("batches"), run.of(BATCH, 4), SEGMENT * steps)
        curve = learn(run, model, cut(rows, SEGMENT), answers_loss(model), steps, f"planted, {name}")
        found[name] = {"curve": curve.data(), "right": right(model, test, memory)}
    found["XL, longer"] = {"right": right(model, test, LONGER)}
    return found


def cut(rows: Planted, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and answers, segment by segment."""
    return zip(rows.tokens.split(length, 1), rows.answers.split(length, 1), strict=True)


def learn(
    run: Run,
    model: TransformerXL,
    batches: Iterator[tuple[Tensor, Tensor]],
    loss: Callable[[tuple[Tensor, Tensor]], Tensor],
    steps: int,
    note: str,
) -> Curve:
    return train(
        model,
        batches,
        loss,
        steps,
        adam(model, 2e-3),
        schedule=warm_up(steps // 10 + 1, cosine(steps)),
        told=run.progress,
        note=note,
    )


def reading(model: TransformerXL) -> Callable[[Tensor], Tensor]:
    """Logits of one segment after another: the memory goes from call to call."""
    held: list[Memory | None] = [None]

    def read(tokens: Tensor) -> Tensor:
        logits, held[0] = model(tokens, held[0])
        return logits

    return read


def answers_loss(model: TransformerXL) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    read = reading(model)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, answers = batch
        logits = read(tokens)[..., FILLERS : FILLERS + VALUES]
        total = F.cross_entropy(logits.flatten(0, 1), answers.flatten(), ignore_index=-1, reduction="sum")
        return total / (answers >= 0).sum().clamp(min=1)

    return loss


@torch.no_grad()
def right(model: TransformerXL, test: Planted, keep: int) -> list[float]:
    """The share of right answers by distance, between the edges."""
    memory, said = None, []
    for tokens, _ in cut(test, SEGMENT):
        logits, memory = model(tokens, memory, keep)
        said.append(logits[..., FILLERS : FILLERS + VALUES].argmax(-1))
    hits = torch.cat(said, 1) == test.answers
    asked = test.answers >= 0
    shares = []
    for low, high in pairwise(EDGES):
        inside = asked & (test.distances >= low) & (test.distances < high)
        shares.append(float(hits[inside].float().mean()) if inside.any() else 0.0)
    return shares


# --- a long text ------------------------------------------------------------------------------


def long_text(limit: int) -> Corpus:
    names = [name for name in ("moby-dick", "wikitext-valid") if there_is(name)]
    return characters(limit, names[0] if names else None)


TEXTS = {
    "vanilla": (0, False),
    "XL": (MEMORY, False),
    "absolute": (0, True),
    "absolute, memory": (MEMORY, True),
}


def on_text(run: Run) -> Figures:
    corpus = long_text(run.of(1_200_000, 20_000))
    kept = run.of(32_768, 512)
    before, after = corpus.tokens[:-kept], corpus.tokens[-kept:]
    steps = run.of(600, 3)
    batch = run.of(BATCH, 4)
    rows, test = streams(before, batch), streams(after, run.of(16, 2))
    found: Figures = {"corpus": corpus.name}
    for name, (memory, absolute) in TEXTS.items():
        model = made(run, corpus.vocab, memory, absolute)
        learn(run, model, again(rows), next_loss(model), steps, f"{corpus.name}, {name}")
        found[name] = evaluate(model, test, SEGMENT, memory)
        if name == "XL":
            found["XL, longer"] = evaluate(model, test, SEGMENT, LONGER)
            found["microseconds"] = speeds(model, after[: run.of(2048, 192)])
    return found


def again(rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Segments of a text, and when it ends, of the text anew."""
    while True:
        yield from segments(rows, SEGMENT)


def next_loss(model: TransformerXL) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    held: list[Memory | None] = [None]

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, after = batch
        logits, held[0] = model(tokens, held[0])
        return losses(logits, after).mean()

    return loss


def speeds(model: TransformerXL, text: Tensor) -> Figures:
    """Processor time per token: with a memory, and with what is before each token read anew."""
    keep = LONGER - SEGMENT
    evaluate(model, text[None, : 4 * SEGMENT], SEGMENT, keep)  # the first call is slower than others
    begin = time.process_time()
    evaluate(model, text[None], SEGMENT, keep)
    cached = (time.process_time() - begin) / (len(text) - 1)
    windows = text.unfold(0, LONGER, 1)[:64]
    begin = time.process_time()
    recompute(model.network, windows)
    return {"cached": 1e6 * cached, "recomputed": 1e6 * (time.process_time() - begin) / len(windows)}


@torch.no_grad()
def recompute(network: Transformer, windows: Tensor) -> Tensor:
    """The logits of what comes after each window."""
    return torch.cat([network(part)[:, -1] for part in windows.split(32)])


# --- what came of it --------------------------------------------------------------------------


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    return (*judged_planted(figures), *judged_text([each["text"] for each in figures]))


def judged_planted(figures: Sequence[Figures]) -> tuple[Check, ...]:
    def of(name: str, low: int, high: int) -> list[float | None]:
        """% right at distances from low to high, in steps of ten."""
        first, last = EDGES.index(low), EDGES.index(high)
        parts = [each["planted"][name]["right"][first:last] for each in figures]
        return [100 * sum(part) / len(part) for part in parts]

    chance = 100 * CHANCE
    return (
        within(
            f"from 40 to 90 back vanilla is at chance, {chance:.1f} %, within 5 points",
            of("vanilla", NEAREST, FURTHEST),
            chance - 5,
            chance + 5,
            ".1f",
            " %",
        ),
        within(
            "from 40 to 90 back, short of N * M = 96, XL is right in over 90 %",
            of("XL", NEAREST, FURTHEST),
            90,
            100,
            ".1f",
            " %",
        ),
        below(
            "from 90 to 130 back a longer memory in evaluation is right more often",
            of("XL", FURTHEST, TESTED),
            of("XL, longer", FURTHEST, TESTED),
            ".1f",
            " %",
        ),
    )


def judged_text(found: Sequence[Figures]) -> tuple[Check, ...]:
    orders = {
        "XL is below vanilla": ("XL", "vanilla"),
        "a longer memory in evaluation has a lower loss": ("XL, longer", "XL"),
        "memory makes absolute positions worse": ("absolute", "absolute, memory"),
    }
    return (
        *(
            below(
                f"on the text, {what}",
                [each[lower] for each in found],
                [each[upper] for each in found],
                ".3f",
                " nats",
            )
            for what, (lower, upper) in orders.items()
        ),
        below(
            "evaluation with a memory takes under a tenth of the time of windows read anew",
            [each["microseconds"]["cached"] for each in found],
            [each["microseconds"]["recomputed"] for each in found],
            ".0f",
            " us a token",
            by=10,
        ),
    )


def draw(figures: Sequence[Figures]) -> Pictures:
    middles = [(low + high) / 2 for low, high in pairwise(EDGES)]
    names = {
        "vanilla": "no memory",
        "XL": f"memory {MEMORY}",
        "XL, longer": f"memory {LONGER}, in the test only",
    }
    answers = [
        Series(
            label,
            middles,
            [[100 * share for share in each["planted"][name]["right"]] for each in figures],
        )
        for name, label in names.items()
    ]
    marks = {"chance": 100 * CHANCE}
    texts = [Bar(name, [each["text"][name] for each in figures]) for name in (*TEXTS, "XL, longer")]
    costs = [
        Bar(way, [each["text"]["microseconds"][way] for each in figures]) for way in ("cached", "recomputed")
    ]
    return {
        "planted": picture(
            curves(
                "Planted values, by how far back they are",
                answers,
                Axis("distance"),
                Axis("% right", low=0, high=100, marks=marks),
            )
        ),
        "text": picture(
            bars(f"Loss on {figures[0]['text']['corpus']}", texts, Axis("nats a character")),
            bars("Time of evaluation", costs, Axis("microseconds a token", log=True)),
        ),
    }
