"""H7: what ConvS2S and the Transformer lose without positions, on rows said again and said backwards.

A convolution knows its neighbours, and where the row ends by the zeros beyond it; an encoder of
self-attention knows which symbols there are. What can be made of that is exact: the symbols' orders are
equally likely, so that a row with the numbers c of its symbols costs log(n! / product of c!) nats, and is
right one time in n! / product of c!. That is chance here, from each test row's own symbols. (A decoder
without positions knows by its causal mask what it has said.)

Both models are small (d = 64; three blocks of kernel 3 a side, which see 7 of up to 10 symbols; two layers a
side) and trained alike, without dropout, as no row comes twice. "A small loss" is at most 5 points of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import lgamma

import torch
from torch import Tensor

from qkv import spec
from qkv.charts.pictures import Bar, Series, bars, curves, picture
from qkv.charts.scales import Axis
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.judging import spread, within
from qkv.claims.tasks import Ragged, ragged, reversed_
from qkv.claims.training import adam, cosine, train, warm_up
from qkv.claims.translating import FIRST, Pairs, paired, said_exactly, surprise
from qkv.lineage.convs2s import ConvS2S, Hyperparameters as Convolutions, objective
from qkv.lineage.transformer import Hyperparameters, Transformer, describe
from qkv.nn.choice import use
from qkv.nn.sdpa import SDPA

SYMBOLS, LONGEST, BATCH, WIDTH = 20, 10, 32, 64
VOCAB = FIRST + SYMBOLS
ROWS = spec.Learned(LONGEST + 2)
TASKS: dict[str, Callable[[Ragged], Ragged]] = {"copy": lambda row: row, "reverse": reversed_}
Model = ConvS2S | Transformer


def convolutional(position: spec.Position | None) -> ConvS2S:
    blocks = ((WIDTH, 3),) * 3
    return ConvS2S(VOCAB, VOCAB, Convolutions(WIDTH, blocks, blocks, WIDTH, dropout=0.0), position)


def attentive(position: spec.Position | None) -> Transformer:
    sizes = Hyperparameters(layers=2, width=WIDTH, hidden=4 * WIDTH, heads=4)
    model = Transformer(describe(sizes, VOCAB, position), dropout=0.0)
    use(model.network, SDPA())
    return model


MODELS: dict[str, Callable[[], Model]] = {
    "ConvS2S": lambda: convolutional(ROWS),
    "ConvS2S, no positions": lambda: convolutional(None),
    "Transformer": lambda: attentive(spec.Sinusoidal()),
    "Transformer, no positions": lambda: attentive(None),
}


def measure(run: Run) -> Figures:
    found: Figures = {}
    for task, turned in TASKS.items():
        source = ragged(run.generator("test"), run.of(2000, 32), 1, run.of(LONGEST, 3), SYMBOLS, FIRST)
        test, orders = paired(source, turned(source)), log_orders(source)
        found[task] = {
            "chance": {"exact": float((-orders).exp().mean()), "nats": float(orders.mean())},
        }
        for name, make in MODELS.items():
            torch.manual_seed(run.number("weights"))
            model = make()
            curve = trained(run, model, turned, f"{task}, {name}")
            found[task][name] = {
                "curve": curve,
                "exact": float(said_exactly(model, test).float().mean()),
                "nats": float(surprise(model, test).mean()),
            }
    return found


def log_orders(rows: Ragged) -> Tensor:
    """The logarithm of how many different orders the symbols of each row have, (rows,) float32."""
    found = []
    for tokens, length in zip(rows.tokens.tolist(), rows.lengths.tolist(), strict=True):
        counts = [tokens[:length].count(symbol) for symbol in set(tokens[:length])]
        found.append(lgamma(length + 1) - sum(lgamma(count + 1) for count in counts))
    return torch.tensor(found)


def trained(run: Run, model: Model, turned: Callable[[Ragged], Ragged], note: str) -> dict[str, object]:
    """Trains on endless rows; the curve, for figures."""
    draw = run.generator("batches")

    def batches() -> Iterator[Pairs]:
        while True:
            source = ragged(draw, BATCH, 1, LONGEST, SYMBOLS, FIRST)
            yield paired(source, turned(source))

    def loss(batch: Pairs) -> Tensor:
        logits = model(batch.source, batch.present, batch.target)
        return objective(logits, batch.target, batch.there)

    steps = run.of(800, 2)
    curve = train(
        model,
        batches(),
        loss,
        steps,
        adam(model, 2e-3),
        schedule=warm_up(steps // 10, cosine(steps)),
        told=run.progress,
        note=note,
        points=30,
    )
    return curve.data()


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    def exact(task: str, name: str) -> list[float]:
        return [100 * each[task][name]["exact"] for each in figures]

    checks = []
    for task in TASKS:
        with_them, without = exact(task, "ConvS2S"), exact(task, "ConvS2S, no positions")
        lost = [one - other for one, other in zip(with_them, without, strict=True)]
        checks += [
            within(
                f"{task}: ConvS2S with positions says 90 % of rows exactly", with_them, 90, 100, ".1f", " %"
            ),
            within(
                f"{task}: without positions ConvS2S loses at most 5 points",
                lost,
                high=5,
                form="+.2f",
                unit=" points",
            ),
            within(
                f"{task}: the Transformer with positions says 90 % of rows exactly",
                exact(task, "Transformer"),
                90,
                100,
                ".1f",
                " %",
            ),
            *at_chance(figures, task, "Transformer, no positions"),
        ]
    return tuple(checks)


def at_chance(figures: Sequence[Figures], task: str, name: str) -> tuple[Check, Check]:
    """Rows exact within 3 points of chance, and nats not below, but for what 2,000 rows make uncertain."""
    exact = [100 * each[task][name]["exact"] for each in figures]
    chance = [100 * each[task]["chance"]["exact"] for each in figures]
    nats, least = ([each[task][key]["nats"] for each in figures] for key in (name, "chance"))
    return (
        Check(
            f"{task}: {name}: exact rows are at chance, within 3 points",
            f"{spread(exact, '.1f', ' %')} against {spread(chance, '.1f', ' %')}",
            all(abs(one - other) <= 3 for one, other in zip(exact, chance, strict=True)),
        ),
        Check(
            f"{task}: {name}: no fewer nats a row than knowing the symbols alone costs, but for 2 %",
            f"{spread(nats, '.2f')} against {spread(least, '.2f')}",
            all(one >= 0.98 * other for one, other in zip(nats, least, strict=True)),
        ),
    )


def draw(figures: Sequence[Figures]) -> Pictures:
    panels = {}
    for task in TASKS:
        losses = [
            Series(
                name,
                figures[0][task][name]["curve"]["steps"],
                [each[task][name]["curve"]["losses"] for each in figures],
            )
            for name in MODELS
        ]
        exact = [Bar(name, [100 * each[task][name]["exact"] for each in figures]) for name in MODELS]
        chance = {"symbols alone": 100 * figures[0][task]["chance"]["exact"]}
        panels[task] = picture(
            bars(f"{task}: rows said exactly", exact, Axis("% of rows", high=100, marks=chance)),
            curves("Loss in training", losses, Axis("step"), Axis("nats a token", low=0)),
        )
    return panels
