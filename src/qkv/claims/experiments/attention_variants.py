"""H3: rows whose symbols are to be said once, twice or three times, by every way to look of Luong et al.

A source token is one of 10 symbols together with how often to say it, 1 to 3 times; neighbours are
different symbols, so that a symbol said once more than asked is seen as such. A source has 2 to 10 tokens
and is not reversed, as local-m counts from its start. One layer of 64, a window of D = 3, first weights
and clipping as in the paper, Adam. All but the last variant feed their attention on to the next step, as
in the paper's tables.

A repeat too many is counted where the target goes on to another symbol or ends, and the likeliest token is
the symbol just said once more, all before it being given. Where a variant looks is the mean place under
its weights; what it should look at is the place of the source token that is being said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv import spec
from qkv.charts.pictures import HALF, Bar, Series, bars, curves, heat, picture
from qkv.charts.scales import Axis
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.judging import Values, below, spread, within
from qkv.claims.tasks import PAD, Ragged
from qkv.claims.training import adam, cosine, train
from qkv.claims.translating import FIRST, Pairs, like_lengths, paired, said_exactly
from qkv.lineage.luong import Global, LocalMonotonic, LocalPredictive, Looking, Luong, Sizes
from qkv.lineage.translation import negative_log_likelihood

SYMBOLS, MOST, LONGEST, BATCH, WIDTH, WINDOW = 10, 3, 10, 32, 64, 3
QUARTERS = 4
ALONE = "general, not fed"


@dataclass(frozen=True)
class Variant:
    looking: Callable[[Sizes], Looking] = Global
    score: spec.Node = spec.General()
    feeding: bool = True


VARIANTS = {
    "dot": Variant(score=spec.Dot()),
    "general": Variant(),
    "concat": Variant(score=spec.Concat(WIDTH)),
    "local-m": Variant(LocalMonotonic),
    "local-p": Variant(LocalPredictive),
    ALONE: Variant(feeding=False),
}
SCORES = ("dot", "general", "concat")


class Repeated(NamedTuple):
    """Pairs, and for each symbol of a target the place of the source token that it comes from."""

    pairs: Pairs
    places: Int[Tensor, "rows symbols"]


def repeated(generator: torch.Generator, rows: int) -> Repeated:
    lengths = torch.randint(2, LONGEST + 1, (rows,), generator=generator)
    there = torch.arange(LONGEST) < lengths[:, None]
    steps = torch.randint(1, SYMBOLS, (rows, LONGEST), generator=generator)  # never to the same symbol
    symbols = steps.cumsum(1) % SYMBOLS
    times = torch.randint(1, MOST + 1, (rows, LONGEST), generator=generator).masked_fill(~there, 0)
    source = (FIRST + SYMBOLS * (times - 1) + symbols).masked_fill(~there, PAD)
    ends = times.cumsum(1)
    said = torch.arange(MOST * LONGEST)
    places = (ends[:, None] <= said[:, None]).sum(-1).clamp(max=LONGEST - 1)
    total = ends[:, -1]
    target = (FIRST + symbols.gather(1, places)).masked_fill(said >= total[:, None], PAD)
    return Repeated(paired(Ragged(source, lengths), Ragged(target, total)), places)


def network(run: Run, variant: Variant) -> Luong:
    torch.manual_seed(run.number("weights"))
    width = run.of(WIDTH, 8)
    sizes = Sizes(
        FIRST + SYMBOLS * MOST,
        FIRST + SYMBOLS,
        width,
        width,
        layers=1,
        score=variant.score,
        feeding=variant.feeding,
        window=WINDOW,
    )
    return Luong(sizes, variant.looking)


def measure(run: Run) -> Figures:
    test = repeated(run.generator("test"), run.of(1000, 16))
    steps = run.of(1200, 2)
    found: Figures = {}
    for name, variant in VARIANTS.items():
        model, draw = network(run, variant), run.generator("batches")

        def batches(draw: torch.Generator = draw) -> Iterator[Pairs]:
            return like_lengths(lambda rows: repeated(draw, rows).pairs, run.of(BATCH, 4), draw)

        def loss(batch: Pairs, model: Luong = model) -> Tensor:
            logits = model(batch.source, batch.present, batch.target)
            return negative_log_likelihood(logits, batch.target, batch.there)

        curve = train(
            model,
            batches(),
            loss,
            steps,
            adam(model, 3e-3),
            schedule=cosine(steps),
            clip=5.0,
            told=run.progress,
            note=name,
            points=40,
        )
        found[name] = {"curve": curve.data(), **measured(model, test)}
    return found


@torch.no_grad()
def measured(model: Luong, test: Repeated) -> Figures:
    pairs, places = test
    centres: list[Tensor] = []
    hook = None
    if isinstance(model.looking, LocalPredictive):  # it says where it looks
        hook = model.looking.register_forward_hook(
            lambda looking, given, view: centres.append(looking.centre(given[0], given[2]))
        )
    weights = model.alignment(pairs.source, pairs.present, pairs.target)
    if hook is not None:
        hook.remove()
    symbols = pairs.there[:, 2:]  # without the start and the end
    truth = places[:, : symbols.shape[1]]
    weights = weights[:, : symbols.shape[1]]
    looked = (weights @ torch.arange(weights.shape[-1], dtype=weights.dtype)) / weights.sum(-1).clamp(
        min=1e-9
    )
    found: Figures = {
        "exact": float(said_exactly(model, pairs).float().mean()),
        "away": by_quarter((looked - truth).abs(), symbols),
        "repeats": repeats(model, pairs),
        "looked": [[round(value, 3) for value in row] for row in shown(weights, symbols)],
    }
    if centres:
        centre = torch.cat(centres, 1)[:, : symbols.shape[1]]
        found["centre"] = float((centre - truth).abs()[symbols].mean())
    return found


def by_quarter(values: Float[Tensor, "rows symbols"], there: Bool[Tensor, "rows symbols"]) -> list[float]:
    """Means over the quarters of the targets."""
    quarter = QUARTERS * torch.arange(values.shape[1]) // there.sum(1, keepdim=True)
    return [float(values[there & (quarter == number)].mean()) for number in range(QUARTERS)]


def repeats(model: Luong, pairs: Pairs) -> float:
    """Of all places where a target leaves a symbol, at how many the model would say it again."""
    guess = model(pairs.source, pairs.present, pairs.target)[:, :-1].argmax(-1)
    before, after = pairs.target[:, :-1], pairs.target[:, 1:]
    leaves = pairs.there[:, 1:] & (before != after) & (before >= FIRST)
    return float((guess == before)[leaves].float().mean())


def shown(
    weights: Float[Tensor, "rows symbols source"], symbols: Bool[Tensor, "rows symbols"]
) -> list[list[float]]:
    """Of the row whose target is longest."""
    row = int(symbols.sum(1).argmax())
    return weights[row, : int(symbols[row].sum())].tolist()


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    def of(name: str, figure: str) -> list[float]:
        return [each[name][figure] for each in figures]

    def away(name: str, quarter: int) -> Values:
        return [each[name]["away"][quarter] for each in figures]

    def exact(name: str) -> list[float]:
        return [100 * value for value in of(name, "exact")]

    alike = [
        one >= 50 and abs(one - other) <= 5
        for one, other in zip(exact("general"), exact("local-p"), strict=True)
    ]
    table = ", ".join(f"{name} {spread(exact(name), '.1f', ' %')}" for name in SCORES)
    lasts = [each[name]["curve"]["last"] for each in figures for name in SCORES]
    fed, alone = ([100 * value for value in of(name, "repeats")] for name in ("general", ALONE))
    return (
        below(
            "local-m drifts: it looks further off in the last quarter of a target than in the first",
            away("local-m", 0),
            away("local-m", -1),
            unit=" places",
        ),
        within("local-m ends more than a place off", away("local-m", -1), 1, unit=" places"),
        within(
            "local-p: p_t is less than a place off in the mean", of("local-p", "centre"), 0, 1, unit=" places"
        ),
        Check(
            "global and local-p say at least half of the rows exactly, and are at most 5 points apart",
            f"{spread(exact('general'), '.1f', ' %')} and {spread(exact('local-p'), '.1f', ' %')}",
            all(alike),
        ),
        Check("dot, general and concat all train", f"rows exact: {table}", None not in lasts),
        below("input feeding cuts repeats", fed, alone, ".2f", " %"),
    )


def draw(figures: Sequence[Figures]) -> Pictures:
    rows = [Bar(name, [100 * each[name]["exact"] for each in figures]) for name in VARIANTS]
    again = [Bar(name, [100 * each[name]["repeats"] for each in figures]) for name in VARIANTS]
    off = [
        Series(name, list(range(1, QUARTERS + 1)), [each[name]["away"] for each in figures])
        for name in ("general", "local-m", "local-p")
    ]
    maps = [
        heat(
            name,
            figures[0][name]["looked"],
            [str(place) for place in range(1, len(figures[0][name]["looked"]) + 1)],
            [str(place) for place in range(1, len(figures[0][name]["looked"][0]) + 1)],
            "said",
            "source",
            HALF,
        )
        for name in ("general", ALONE, "local-m", "local-p")
    ]
    axis = Axis("quarter of the target", ticks=tuple(range(1, QUARTERS + 1)))
    return {
        "exact": picture(
            bars("Rows said exactly", rows, Axis("rows, %", high=100)),
            bars("Repeats too many", again, Axis("of all places where a symbol is left, %")),
        ),
        "place": picture(curves("Where it looks, and where it should", off, axis, Axis("places off", low=0))),
        "alignment": picture(*maps),
    }
