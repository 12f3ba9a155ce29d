"""H21: one thing changed at a time from LayerNorm with GELU, at equal parameters, on characters.

A gated feed-forward is narrower, so that each variant's parameters are within half a percent of the
others'. The noise is what the seed alone changes: each seed has weights and batches of its own, shared by
all variants, so that differences within a seed are less noisy than losses are.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from qkv import spec
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.data import characters
from qkv.claims.judging import spread
from qkv.claims.modelling import losses_drawn
from qkv.claims.models import initialised, small_lm
from qkv.claims.training import cosine, held_out, mean_loss, next_token_loss, train, warm_up, windows

WIDTH, LENGTH, BATCH = 64, 64, 32
NARROW = 170  # 3 matrices of it are as many weights as 2 of 4 * 64, but for half a percent
Mixer = spec.Dense | spec.Gated
VARIANTS: dict[str, tuple[spec.Norm, Mixer]] = {
    "LayerNorm, GELU": (spec.LayerNorm(), spec.Dense("gelu", 4 * WIDTH)),
    "RMSNorm, GELU": (spec.RMSNorm(), spec.Dense("gelu", 4 * WIDTH)),
    "LayerNorm, ReLU": (spec.LayerNorm(), spec.Dense("relu", 4 * WIDTH)),
    "LayerNorm, SwiGLU": (spec.LayerNorm(), spec.Gated("silu", NARROW, bias=True)),
}
BASE = "LayerNorm, GELU"


def measure(run: Run) -> Figures:
    corpus = characters(run.of(1_000_000, 20_000))
    rows = held_out(corpus.tokens, LENGTH, run.of(512, 8))
    steps = run.of(1000, 2)
    found: Figures = {"corpus": corpus.name}
    for name, (norm, mixer) in VARIANTS.items():
        model = small_lm(corpus.vocab, position=spec.Learned(LENGTH), norm=norm, mixer=mixer)
        network = initialised(model, run.generator("weights"))
        batches = windows(corpus.tokens[: -rows.numel()], LENGTH, BATCH, run.generator("batches"))
        curve = train(
            network,
            batches,
            next_token_loss(network),
            steps,
            schedule=warm_up(steps // 10, cosine(steps)),
            told=run.progress,
            note=name,
            points=40,
        )
        found[name] = {
            "parameters": model.parameters(),
            "curve": curve.data(),
            "held_out": mean_loss(network, rows),
        }
    return found


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    sizes = [figures[0][name]["parameters"] for name in VARIANTS]
    checks = [
        Check(
            "all have equal parameters within half a percent",
            f"{min(sizes):,} to {max(sizes):,}",
            max(sizes) <= 1.005 * min(sizes),
        )
    ]
    base = [each[BASE]["held_out"] for each in figures]
    noise = 100 * (max(base) - min(base)) / median(base)
    for name in VARIANTS:
        if name != BASE:
            apart = [100 * (each[name]["held_out"] / each[BASE]["held_out"] - 1) for each in figures]
            words = f"{spread(apart, '+.2f', ' %')}; seeds alone change {BASE} by {noise:.2f} %"
            checks.append(
                Check(f"{name} ends within 2 % of {BASE}'s loss", words, all(abs(one) <= 2 for one in apart))
            )
    return tuple(checks)


def draw(figures: Sequence[Figures]) -> Pictures:
    return {"loss": losses_drawn(figures, {name: name for name in VARIANTS})}
