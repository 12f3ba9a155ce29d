"""H2: rows of 1 to 30 symbols, to be said again or backwards, with a search through the source and without.

RNNsearch and RNNencdec of the same sizes (GRUs of 64) on the same batches, which hold rows of like lengths
as in the paper's appendix B.2. One network learns both tasks, so that three seeds fit into ten minutes: the
source's first token says which. Two things of the paper are for widths of 1,000 and weeks, and were changed
when a first training had hardly left chance after 3,000 steps: matrices start with a spread of
1 / sqrt(inputs) in place of 0.01 (recurrences orthogonal, as they were), and Adam replaces Adadelta.

A weight counts as right where the greatest of a target's lies within one place of the symbol it should
say: an annotation knows its neighbours, so a network may just as well read the one beside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from qkv.charts.pictures import HALF, Series, curves, heat, picture
from qkv.charts.scales import Axis
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.judging import within
from qkv.claims.models import initialise
from qkv.claims.tasks import Ragged, ragged, reversed_
from qkv.claims.training import adam, by_bucket, cosine, train
from qkv.claims.translating import FIRST, Pairs, like_lengths, paired, said_exactly
from qkv.lineage.bahdanau import GRU, RNNsearch, Sizes, rnn_encdec
from qkv.lineage.translation import negative_log_likelihood

SYMBOLS, LONGEST, BATCH, WIDTH = 20, 30, 32, 64
VOCAB = FIRST + SYMBOLS
TASKS: dict[str, Callable[[Ragged], Ragged]] = {"copy": lambda row: row, "reverse": reversed_}
EDGES = (1, 6, 11, 16, 21, 26, LONGEST + 1)
BUCKETS = tuple(f"{low} to {high - 1}" for low, high in pairwise(EDGES))
MODELS: dict[str, Callable[[Sizes], RNNsearch]] = {"search": RNNsearch, "encdec": rnn_encdec}
SHOWN = 12  # symbols in the row that is drawn


def framed(row: Ragged, task: int) -> Pairs:
    """The pair of a row for the task of this number; tokens behind the symbols name the tasks."""
    mark = torch.full((len(row.tokens), 1), VOCAB + task)
    marked = Ragged(torch.cat([mark, row.tokens], 1), row.lengths + 1)
    return paired(marked, list(TASKS.values())[task](row))


def mixed(generator: torch.Generator, rows: int) -> Pairs:
    """The first half of the rows to be copied, the second to be reversed."""
    row = ragged(generator, rows, 1, LONGEST, SYMBOLS, FIRST)
    half = [Ragged(*(part[i * rows // 2 : (i + 1) * rows // 2] for part in row)) for i in range(2)]
    return Pairs(*(torch.cat(parts) for parts in zip(*map(framed, half, range(2)), strict=True)))


def network(run: Run, model: str) -> RNNsearch:
    torch.manual_seed(run.number("weights"))
    width = run.of(WIDTH, 8)
    made = MODELS[model](Sizes(VOCAB + len(TASKS), VOCAB, width, width, width, width))
    initialise(made, run.generator("weights"))
    for unit in made.modules():
        if isinstance(unit, GRU):
            unit.reset_parameters()
    return made


def measure(run: Run) -> Figures:
    found: Figures = {"curves": {}, "exact": {}, "steep": {}, "looked": {}}
    steps = run.of(3000, 2)
    for name in MODELS:
        model = network(run, name)
        draw = run.generator("batches")

        def loss(batch: Pairs, model: RNNsearch = model) -> Tensor:
            logits = model(batch.source, batch.present, batch.target)
            return negative_log_likelihood(logits, batch.target, batch.there)

        found["curves"][name] = train(
            model,
            like_lengths(partial(mixed, draw), run.of(BATCH, 4), draw),
            loss,
            steps,
            adam(model, 3e-3),
            schedule=cosine(steps),
            told=run.progress,
            note=name,
        ).data()
        for number, task in enumerate(TASKS):
            row = ragged(run.generator("test"), run.of(1200, 16), 1, LONGEST, SYMBOLS, FIRST)
            pairs = framed(row, number)
            shares = by_bucket(row.lengths, said_exactly(model, pairs), EDGES)
            found["exact"][f"{name}, {task}"] = shares
            if name == "search":
                found["steep"][task] = on_the_line(model, pairs, row.lengths, task)
                found["looked"][task] = looked(model, run, number)
    return found


def wanted(lengths: Tensor, longest: int, task: str) -> Tensor:
    """The place in the row of each target symbol: (rows, longest)."""
    steps = torch.arange(longest).expand(len(lengths), -1)
    return steps if task == "copy" else lengths[:, None] - 1 - steps


@torch.no_grad()
def on_the_line(model: RNNsearch, pairs: Pairs, lengths: Tensor, task: str, batch: int = 256) -> float:
    """The share of target symbols whose greatest weight is at most a place beside theirs."""
    hits, total = 0, 0
    parts = (*pairs, lengths)
    for source, present, target, there, length in zip(*(part.split(batch) for part in parts), strict=True):
        weights = model.alignment(source, present, target)[:, :LONGEST, 1:]  # without the task's mark
        off = (weights.argmax(-1) - wanted(length, LONGEST, task)).abs()
        counts = there[:, 2:]  # the symbols, and not the end
        hits += int(((off <= 1) & counts).sum())
        total += int(counts.sum())
    return hits / total


@torch.no_grad()
def looked(model: RNNsearch, run: Run, task: int) -> list[list[float]]:
    """The weights for one row: (symbols and the end, mark and symbols)."""
    tokens = torch.randint(FIRST, VOCAB, (1, SHOWN), generator=run.generator("shown"))
    pairs = framed(Ragged(tokens, torch.tensor([SHOWN])), task)
    weights = model.alignment(pairs.source, pairs.present, pairs.target)[0, :-1]
    return [[round(value, 3) for value in row] for row in weights.tolist()]


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    def percent(name: str, bucket: int) -> list[float | None]:
        shares = [each["exact"][name][bucket] for each in figures]
        return [None if share is None else 100 * share for share in shares]

    checks = []
    for task in TASKS:
        for bucket, words in enumerate(BUCKETS):
            checks.append(
                within(
                    f"search, {task}: over 95 % of rows of {words} symbols are exact",
                    percent(f"search, {task}", bucket),
                    95,
                    100,
                    ".1f",
                    " %",
                    "not measured",
                )
            )
        name = f"encdec, {task}"
        checks.append(_least(f"{name}: of 1 to 5 symbols at least half are exact", percent(name, 0)))
        for bucket, words in enumerate(BUCKETS[3:], 3):
            what = f"{name}: of {words} symbols fewer than half are exact"
            checks.append(within(what, percent(name, bucket), 0, 50, ".1f", " %", "not measured"))
        line = "diagonal" if task == "copy" else "anti-diagonal"
        steep: list[float | None] = [100 * each["steep"][task] for each in figures]
        what = (
            f"search, {task}: at least 90 % of the greatest weights lie on the {line}, give or take a place"
        )
        checks.append(within(what, steep, 90, 100, ".1f", " %"))
    return tuple(checks)


def _least(what: str, values: Sequence[float | None]) -> Check:
    return within(what, values, 50, 100, ".1f", " %", "not measured")


def draw(figures: Sequence[Figures]) -> Pictures:
    middles = [(low + high - 1) / 2 for low, high in pairwise(EDGES)]
    by_length, maps = [], []
    for task in TASKS:
        series = [
            Series(
                name,
                middles,
                [
                    [None if share is None else 100 * share for share in each["exact"][f"{name}, {task}"]]
                    for each in figures
                ],
            )
            for name in MODELS
        ]
        by_length.append(
            curves(task, series, Axis("symbols in the row", low=0), Axis("rows exact, %", low=0, high=100))
        )
        weights = figures[0]["looked"][task]
        places = [str(place) for place in range(1, SHOWN + 1)]
        maps.append(heat(task, weights, [*places, "end"], [task, *places], "said", "source", HALF))
    return {"length": picture(*by_length), "alignment": picture(*maps)}
