"""H4: which value stood beside a key, after 5 to 40 other tokens, by an LSTM and by one with a tape.

Rows are 4 pairs of a key and a value, each pair one token, then fillers, then one of the keys; the answer,
of 8 values, is read from the last hidden state. The gap is the number of fillers, one of 8 kinds each, drawn
anew for every batch. The LSTM is as wide as makes its parameters, all together, the closest to those of the
LSTMN. Both start from a spread of 1 / sqrt(inputs), with 1 for the bias of the forget gate, as is usual for
LSTMs (Jozefowicz et al. 2015), and see the same batches. In first trials key and value were two tokens:
neither network then learned in 3,000 steps which value belongs to a key, so that there was nothing to forget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.charts.pictures import Series, curves, heat, picture
from qkv.charts.scales import Axis
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.judging import below, within
from qkv.claims.models import initialise
from qkv.claims.tasks import recall
from qkv.claims.training import adam, cosine, train
from qkv.lineage.lstmn import LSTMN, LSTMNLayer

PAIRS, KEYS, VALUES, FILLERS = 4, 8, 8, 8
GAPS = (5, 10, 15, 20, 25, 30, 35, 40)
WIDTH, CELL, BATCH = 32, 64, 32
ASKED = KEYS * VALUES  # the first token that asks for a key; those before it are pairs
TOKENS = ASKED + KEYS + FILLERS


class Rows(NamedTuple):
    tokens: Int[Tensor, "rows length"]
    answers: Int[Tensor, " rows"]  # from 0


def rows_of(generator: torch.Generator, rows: int, gap: int) -> Rows:
    tokens, answers, _ = recall(generator, rows, PAIRS, gap, KEYS, VALUES, FILLERS)
    keys, values = tokens[:, : 2 * PAIRS : 2], tokens[:, 1 : 2 * PAIRS : 2] - KEYS
    fillers = tokens[:, 2 * PAIRS : -1] - VALUES  # numbered behind keys and values there, behind keys here
    after = ASKED + torch.cat([fillers, tokens[:, -1:]], 1)
    return Rows(torch.cat([keys * VALUES + values, after], 1), answers - KEYS)


class Reader(nn.Module):
    """Embedding, recurrence, and the answer from the last state: (rows, length) -> (rows, values)."""

    def __init__(self, width: int, cell: int):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        self.output = nn.Linear(cell, VALUES)

    def forward(self, tokens: Int[Tensor, "rows length"]) -> Float[Tensor, "rows values"]:
        return cast(Tensor, self.output(self.last(self.embedding(tokens))))

    def last(self, x: Float[Tensor, "rows length width"]) -> Float[Tensor, "rows cell"]:
        raise NotImplementedError

    def gates(self) -> Float[Tensor, " four_cells"]:
        """The bias of the gates, of which the second quarter is the forget gate's."""
        raise NotImplementedError


class WithCell(Reader):
    def __init__(self, width: int, cell: int):
        super().__init__(width, cell)
        self.lstm = nn.LSTM(width, cell, batch_first=True)

    def last(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.lstm(x)[0][:, -1])

    def gates(self) -> Tensor:
        return cast(Tensor, self.lstm.bias_ih_l0)


class WithTape(Reader):
    def __init__(self, width: int, cell: int):
        super().__init__(width, cell)
        self.lstmn = LSTMN(width, cell, 1)

    def last(self, x: Tensor) -> Tensor:
        return self.read(x)[0]

    def gates(self) -> Tensor:
        return cast(LSTMNLayer, self.lstmn.layers[0]).of_input.bias

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The last state, and which earlier token each token looked at: (rows, length, length)."""
        reading = self.lstmn(x, torch.ones(x.shape[:2], dtype=torch.bool))
        return reading.hidden[:, -1], reading.weights[:, 0]


@torch.no_grad()
def start(reader: Reader, generator: torch.Generator) -> None:
    initialise(reader, generator)
    reader.gates().chunk(4)[1].fill_(1)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def as_large(tape: WithTape, width: int) -> int:
    """The LSTM's cell that makes the two the closest in parameters."""
    cell = tape.output.in_features
    candidates = range(cell, 2 * cell)
    return min(candidates, key=lambda size: abs(parameters(WithCell(width, size)) - parameters(tape)))


def measure(run: Run) -> Figures:
    width, cell = run.of(WIDTH, 8), run.of(CELL, 8)
    tape = WithTape(width, cell)
    models: dict[str, Reader] = {"LSTMN": tape, "LSTM": WithCell(width, as_large(tape, width))}
    found: Figures = {name: learned(run, name, model) for name, model in models.items()}
    row = rows_of(run.generator("shown"), 1, GAPS[0])
    with torch.no_grad():
        weights = tape.read(tape.embedding(row.tokens))[1][0]
    found["looked"] = [[round(value, 3) for value in line] for line in weights.tolist()]
    found["names"] = [named(token) for token in row.tokens[0].tolist()]
    return found


def named(token: int) -> str:
    """3=5 for a pair, 3? for a key that is asked for, a dot for a filler."""
    if token < ASKED:
        return f"{token // VALUES + 1}={token % VALUES + 1}"
    return f"{token - ASKED + 1}?" if token < ASKED + KEYS else "·"


def learned(run: Run, name: str, model: Reader) -> Figures:
    draw, steps = run.generator("batches"), run.of(3000, 2)
    start(model, run.generator("weights"))

    def batches() -> Iterator[Rows]:
        while True:
            gap = int(torch.randint(GAPS[0], GAPS[-1] + 1, (), generator=draw))
            yield rows_of(draw, BATCH, gap)

    def loss(batch: Rows) -> Tensor:
        return F.cross_entropy(model(batch.tokens), batch.answers)

    curve = train(
        model,
        batches(),
        loss,
        steps,
        adam(model, 3e-3),
        schedule=cosine(steps),
        told=run.progress,
        note=name,
    )
    shares = []
    with torch.no_grad():
        for gap in GAPS:
            test = rows_of(run.generator(f"test {gap}"), run.of(1000, 16), gap)
            shares.append(float((model(test.tokens).argmax(-1) == test.answers).float().mean()))
    return {"curve": curve.data(), "parameters": parameters(model), "right": shares}


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    def right(name: str, gap: int) -> list[float | None]:
        return [100 * each[name]["right"][GAPS.index(gap)] for each in figures]

    def lost(name: str) -> list[float | None]:
        return [100 * (each[name]["right"][0] - each[name]["right"][-1]) for each in figures]

    first, last = GAPS[0], GAPS[-1]
    sizes = [(each["LSTMN"]["parameters"], each["LSTM"]["parameters"]) for each in figures]
    apart = max(abs(one - other) / one for one, other in sizes)
    span = f"from a gap of {first} to one of {last}"
    return (
        Check(
            "the two have equal parameters, within 2 %",
            f"LSTMN {sizes[0][0]:,}, LSTM {sizes[0][1]:,}",
            apart <= 0.02,
        ),
        within(f"the LSTM decays: it loses at least 5 points {span}", lost("LSTM"), 5, 100, ".1f", " points"),
        within(
            f"the LSTMN is flat: it loses at most 5 points {span}", lost("LSTMN"), -5, 5, ".1f", " points"
        ),
        within(
            f"and has learned: at least half are right at {first}, chance is {100 / VALUES:g} %",
            right("LSTMN", first),
            50,
            100,
            ".1f",
            " %",
        ),
        below(
            f"at {last} the LSTMN is right more often", right("LSTM", last), right("LSTMN", last), ".1f", " %"
        ),
    )


def draw(figures: Sequence[Figures]) -> Pictures:
    series = [
        Series(name, GAPS, [[100 * share for share in each[name]["right"]] for each in figures])
        for name in ("LSTM", "LSTMN")
    ]
    right = Axis("% right", low=0, high=100, marks={"chance": 100 / VALUES})
    losses = [
        Series(name, figures[0][name]["curve"]["steps"], [each[name]["curve"]["losses"] for each in figures])
        for name in ("LSTM", "LSTMN")
    ]
    names = figures[0]["names"]
    return {
        "gap": picture(curves("Values recalled", series, Axis("tokens between"), right)),
        "loss": picture(curves("Training", losses, Axis("step"), Axis("loss, nats", low=0))),
        "looked": picture(
            heat("Where the LSTMN looks back", figures[0]["looked"], names, names, "reads", "looks at")
        ),
    }
