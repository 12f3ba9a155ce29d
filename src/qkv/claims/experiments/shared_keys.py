"""H19: a key and value for every head (MHA), for groups of heads (GQA), for all (MQA), or a latent (MLA).

Language models of characters, 8 heads of 8, that differ in nothing else: the same steps, batches and kinds of
first weights. Fewer keys are also fewer parameters; they are reported. The latent has the proportions of
DeepSeek-V2 (section 2.1.4): four heads wide, and a rotated key of half a head.

The cache is that of the trained network after it has read a text token by token: the bytes of its tensors.
Answers with it must be those without; of the latent also absorbed, as it is run where a cache is small.
Small is a spread of 3 % of the loss (Ainslie et al. 2023, table 1: 47.2 and 46.6 for MHA and MQA; Shazeer
2019, table 3: 1.424 and 1.439 nats).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from qkv import spec
from qkv.charts.pictures import Bar, bars, picture
from qkv.charts.scales import Axis
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.judging import spread, within
from qkv.claims.modelling import LENGTH, losses_drawn, reading, trained
from qkv.claims.models import TABLE
from qkv.nn import ContiguousCache, Transformer
from qkv.nn.latent import LatentAttention

WIDTH, HEADS, SIZE, LAYERS = 64, 8, 8, 2
SMALL, EQUAL = 3.0, 1e-5  # per cent of the loss; of the largest answer
ROTARY = spec.Rotary()
MHA, GQA, MQA, MLA = "MHA", "GQA", "MQA", "MLA"
KINDS: dict[str, spec.Attention | spec.LatentAttention] = {
    MHA: spec.Attention(HEADS, HEADS, SIZE, position=ROTARY),
    GQA: spec.Attention(HEADS, 2, SIZE, position=ROTARY),
    MQA: spec.Attention(HEADS, 1, SIZE, position=ROTARY),
    MLA: spec.LatentAttention(HEADS, SIZE, SIZE // 2, SIZE, 4 * SIZE, position=ROTARY),
}
# of what MHA keeps; the latent is 2.25 pairs of a key and a value, as DeepSeek's is
SHARES = {MHA: 1.0, GQA: 2 / HEADS, MQA: 1 / HEADS, MLA: 2.25 / HEADS}


def measure(run: Run) -> Figures:
    text = reading(run)
    found: Figures = {"corpus": text.corpus.name, "unigrams": text.unigrams}
    for name, attention in KINDS.items():
        model = described(text.corpus.vocab, attention)
        network, figures = trained(run, name, model, text, run.of(800, 3))
        found[name] = figures | cached(network, text.rows[: run.of(8, 2), :LENGTH])
    return found


def described(vocab: int, attention: spec.Attention | spec.LatentAttention) -> spec.Model:
    layer = spec.pre_norm(attention, spec.Dense("gelu", 4 * WIDTH), norm=spec.LayerNorm())
    stack = spec.Stack(spec.Tokens(vocab, WIDTH, shared=TABLE), (layer,) * LAYERS, spec.LayerNorm())
    return spec.Model(decoder=stack, head=spec.Language(vocab, shared=TABLE))


@torch.no_grad()
def cached(network: Transformer, texts: Int[Tensor, "rows length"]) -> Figures:
    """The bytes of a token, and how far answers with the cache are from those of one pass."""
    whole = network(texts)
    latents = [part for part in network.modules() if isinstance(part, LatentAttention)]
    apart = 0.0
    for absorbed in (False, True) if latents else (False,):
        for part in latents:
            part.absorbed = absorbed
        cache = ContiguousCache(network.spec.trunk, *texts.shape)
        answers = torch.cat([network(token, cache=cache) for token in texts.split(1, 1)], 1)
        apart = max(apart, float((answers - whole).abs().max() / whole.abs().max()))
    held = sum(tensor.nbytes for tensors in cache.layers.values() for tensor in tensors)
    return {"bytes": held / texts.numel(), "apart": apart}


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    return (
        losses(figures),
        *(share(figures, name) for name in (GQA, MQA, MLA)),
        within(
            "answers with the cache are those without (1e-5), of MLA in either form",
            [max(each[name]["apart"] for name in KINDS) for each in figures],
            0,
            EQUAL,
            ".1e",
        ),
    )


def losses(figures: Sequence[Figures]) -> Check:
    """By how much the worst of the four is above the best, in each seed."""
    apart: list[float | None] = []
    for each in figures:
        known = [each[name]["held_out"] for name in KINDS]
        apart.append(None if None in known else 100 * (max(known) / min(known) - 1))
    medians = "; ".join(
        f"{name} {spread([each[name]['held_out'] for each in figures], '.3f')}"
        f" with {figures[0][name]['parameters']:,} parameters"
        for name in KINDS
    )
    holds = all(each is not None and each <= SMALL for each in apart)
    what = f"the loss of the worst is at most {SMALL:.0f} % above that of the best"
    return Check(what, f"{spread(apart, '.1f', ' %')}: {medians}", holds)


def share(figures: Sequence[Figures], name: str) -> Check:
    """What a cache keeps of a token, of what it keeps with MHA."""
    found = {each[name]["bytes"] / each[MHA]["bytes"] for each in figures}
    bytes_, all_ = figures[0][name]["bytes"], figures[0][MHA]["bytes"]
    pairs = f"{SHARES[name] * HEADS:g} pair{'s' if SHARES[name] * HEADS > 1 else ''} of key and value"
    return Check(
        f"{name} keeps {SHARES[name]:g} of MHA's cache: {pairs} for {HEADS}",
        f"{' and '.join(f'{each:g}' for each in sorted(found))} ({bytes_:g} of {all_:g} bytes a token)",
        found == {SHARES[name]},
    )


def draw(figures: Sequence[Figures]) -> Pictures:
    kept = [Bar(name, [each[name]["bytes"] for each in figures]) for name in KINDS]
    return {
        "loss": losses_drawn(figures, {name: name for name in KINDS}),
        "cache": picture(bars("Cache of a token", kept, Axis("bytes"))),
    }
