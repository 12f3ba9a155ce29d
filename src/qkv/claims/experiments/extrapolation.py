"""H11: seven position schemes trained on 64 characters, and read up to 512.

Two ways to read on: in pieces of a length, each by itself, and with a window of that length behind every
token. Two layers of width 64; all schemes start from the same weights where they have the same ones, and
read the same batches. Clipped distances (Shaw) and buckets (T5) end at 16 and at 32, so that all of them
are trained: T5's own 128 is a quarter of what it was trained on.

A learned table has as many rows as it has: one of 64 refuses position 64. So that there is a curve,
"learned" is a table of 512 rows, of which training reads 64 and leaves the others as they were drawn.

A loss is flat where it stays within 0.05 nats of that at 64, and breaks where it rises by more than 0.1.
The expectation says nothing of attention without positions (NoPE): it is measured and drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qkv import spec
from qkv.charts.pictures import Series, curves, picture
from qkv.charts.scales import Axis
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.data import characters
from qkv.claims.judging import below, within
from qkv.claims.lengths import non_overlapping, sliding
from qkv.claims.models import initialised, small_lm
from qkv.claims.training import adam, cosine, next_token_loss, train, warm_up, windows
from qkv.errors import QkvError

LENGTH, BATCH, STRIDE = 64, 16, 16
LENGTHS = (64, 80, 96, 128, 256, 512)
FLAT, BREAKS, USELESS = 0.05, 0.1, 0.5  # nats above the loss at 64
SCHEMES: dict[str, spec.Position | None] = {
    "learned": spec.Learned(LENGTHS[-1]),
    "sinusoidal": spec.Sinusoidal(),
    "rotary": spec.Rotary(),
    "T5": spec.Buckets(16, 32, bidirectional=False),
    "Shaw": spec.Shaw(16),
    "ALiBi": spec.Alibi(),
    "none": None,
}
STEADY = ("T5", "Shaw", "ALiBi")


def measure(run: Run) -> Figures:
    corpus = characters(run.of(1_000_000, 20_000))
    kept = run.of(12_289, 1_025)
    found: Figures = {
        "corpus": corpus.name,
        "refused": refused(corpus.vocab),
        "lengths": list(run.of(LENGTHS, (64, 128, 512))),
    }
    before, text = corpus.tokens[:-kept], corpus.tokens[-kept:]
    steps = run.of(1000, 2)
    for name, position in SCHEMES.items():
        model = small_lm(corpus.vocab, layers=run.of(2, 1), position=position)
        network = initialised(model, run.generator("weights"))
        curve = train(
            network,
            windows(before, LENGTH, BATCH, run.generator("batches")),
            next_token_loss(network),
            steps,
            adam(network, 2e-3),
            schedule=warm_up(steps // 20 + 1, cosine(steps)),
            told=run.progress,
            note=name,
        )
        rows = run.of(64, 2)
        found[name] = {
            "trained": curve.last,
            "pieces": [non_overlapping(network, text, length) for length in found["lengths"]],
            "sliding": [
                sliding(network, text, length, LENGTHS[-1], rows, STRIDE) for length in found["lengths"]
            ],
        }
    return found


def refused(vocab: int) -> str | None:
    """What a table of 64 rows says of 65 tokens; None where it took them."""
    model = small_lm(vocab, layers=1, position=spec.Learned(LENGTH))
    network = initialised(model, torch.Generator().manual_seed(0))
    try:
        network(torch.zeros(1, LENGTH + 1, dtype=torch.long))
    except QkvError as problem:
        return str(problem)
    return None


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    def rise(name: str, way: str, length: int) -> list[float | None]:
        return [each[name][way][each["lengths"].index(length)] - each[name][way][0] for each in figures]

    last, unit = LENGTHS[-1], " nats"
    said = figures[0]["refused"]
    checks = [
        Check("a learned table refuses positions past its end", said or "it took them", said is not None),
        within(
            "learned, sliding: past its trained rows the loss is over half a nat higher",
            rise("learned", "sliding", last),
            USELESS,
            form="+.3f",
            unit=unit,
        ),
        *(
            within(
                f"{name} breaks: sliding, the loss at 512 is over 0.1 nats above that at 64",
                rise(name, "sliding", last),
                BREAKS,
                form="+.3f",
                unit=unit,
            )
            for name in ("sinusoidal", "rotary")
        ),
        below(
            "sinusoidal breaks first: sliding, at 128 it has risen by more than rotary",
            rise("rotary", "sliding", 128),
            rise("sinusoidal", "sliding", 128),
            "+.3f",
            unit,
        ),
        *(
            below(
                f"rotary is next: sliding, at 128 it has risen by more than {name}",
                rise(name, "sliding", 128),
                rise("rotary", "sliding", 128),
                "+.3f",
                unit,
            )
            for name in STEADY
        ),
    ]
    for name in STEADY:
        all_rises = [rise(name, "sliding", length) for length in figures[0]["lengths"][1:]]
        furthest = [max(seed, key=lambda value: abs(value or 0)) for seed in zip(*all_rises, strict=True)]
        checks.append(
            within(f"{name} is flat, sliding: within 0.05 nats", furthest, -FLAT, FLAT, "+.3f", unit)
        )
    checks.append(
        below(
            "ALiBi falls in pieces: lower at 512 than at 64",
            [each["ALiBi"]["pieces"][-1] for each in figures],
            [each["ALiBi"]["pieces"][0] for each in figures],
            ".3f",
            unit,
        )
    )
    return tuple(checks)


def draw(figures: Sequence[Figures]) -> Pictures:
    lengths = figures[0]["lengths"]
    across = Axis("characters read", log=True, ticks=(64, 128, 256, 512))
    panels = []
    for way, title in (
        ("pieces", "In pieces, each by itself"),
        ("sliding", "A window behind every character"),
    ):
        series = [Series(name, lengths, [each[name][way] for each in figures]) for name in SCHEMES]
        # seven curves are more than there are colours
        several = [one for one in series if one.name != "none"]
        panels.append(curves(f"{title}; trained on 64", several, across, Axis("loss, nats")))
        steady = [one for one in series if one.name in (*STEADY, "none")]
        panels.append(curves(f"{title}: low ones, and none", steady, across, Axis("loss, nats")))
    return {"pieces": picture(*panels[:2]), "sliding": picture(*panels[2:])}
