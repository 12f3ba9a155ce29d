"""H26: bytes by the formulas of `qkv.planning` against those of tensors that are there, summed.

Every seed draws sizes of its own for six kinds of model, and how many sequences of how many tokens are kept.
Weights are the parameters of the built network, each storage once. The cache is what the blocks hold that
sequences have after every token was stored and what is out of sight handed back, at its largest; `in one
piece` is the same in a cache without blocks. Training is one step of AdamW: 16-bit weights and gradients, and
an fp32 copy with two moments, as the formula supposes; activations are no part of it, since torch does not
list them.

Of Llama-2-7B, Llama-3-8B and Llama-2-70B the weights and the cache of one full context are built on torch's
meta device, which has shapes and types and no memory; so their bytes are summed like those of others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from qkv import spec
from qkv.charts.pictures import Bar, bars, picture
from qkv.charts.scales import Axis
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.judging import within
from qkv.claims.models import initialise
from qkv.nn import ContiguousCache, Transformer
from qkv.nn.paged import PagedCache, kept
from qkv.planning import plan
from qkv.planning.training import training
from qkv.runtime.blocks import BLOCK, Memory, Pool, Reach, blocks

APART = 1.0  # per cent
PARTS = ("weights", "cache", "cache in one piece", "training")
VOCAB = 256


def llama(layers: int, width: int, heads: int, kv_heads: int, hidden: int, vocab: int) -> spec.Model:
    attention = spec.Attention(heads, kv_heads, width // heads, position=spec.Rotary())
    layer = spec.pre_norm(attention, spec.Gated("silu", hidden), norm=spec.RMSNorm())
    stack = spec.Stack(spec.Tokens(vocab, width), (layer,) * layers, spec.RMSNorm())
    return spec.Model(decoder=stack, head=spec.Language(vocab))


# of each its context, and what the sources of the facts say that its cache takes of a token, in KiB
LARGE = {
    "Llama-2-7B": (llama(32, 4096, 32, 32, 11008, 32_000), 4096, 512),
    "Llama-3-8B": (llama(32, 4096, 32, 8, 14336, 128_256), 131_072, 128),
    "Llama-2-70B": (llama(80, 8192, 64, 8, 28672, 32_000), 4096, 320),
}


def measure(run: Run) -> Figures:
    drawn = run.generator("sizes")
    found: Figures = {"small": {}, "large": {}}
    for place, (name, model) in enumerate(kinds(drawn).items()):
        tokens, rows = draw_from(drawn, *run.of((100, 700), (40, 120))), draw_from(drawn, 1, run.of(8, 3))
        found["small"][name] = of_small(model, tokens, rows, run.generator(name))
        run.progress(place + 1, 6, name)
    for name, (model, context, _) in list(LARGE.items())[: run.of(len(LARGE), 1)]:
        found["large"][name] = of_large(model, context)
    return found


def draw_from(generator: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, (), generator=generator))


def kinds(generator: torch.Generator) -> dict[str, spec.Model]:
    """Six kinds of decoder of random sizes."""
    size = 16 * draw_from(generator, 1, 3)  # of a head
    heads, layers = 4 * draw_from(generator, 1, 2), draw_from(generator, 2, 4)
    width, window = heads * size, draw_from(generator, 20, 90)
    rotary, gated = spec.Rotary(), spec.Gated("silu", 2 * width)

    def of(attention: spec.Attention | spec.LatentAttention, mixer: object = gated) -> spec.Layer:
        return spec.pre_norm(attention, mixer, norm=spec.RMSNorm())  # type: ignore[arg-type]

    def heads_of(kv_heads: int, mask: spec.Mask = spec.Causal()) -> spec.Attention:
        return spec.Attention(heads, kv_heads, size, position=rotary, mask=mask)

    def model(*each: spec.Layer) -> spec.Model:
        stack = spec.Stack(spec.Tokens(VOCAB, width), each * layers, spec.RMSNorm())
        return spec.Model(decoder=stack, head=spec.Language(VOCAB))

    latent = spec.LatentAttention(heads, size, size // 2, size, 2 * size, position=rotary)
    near = heads_of(2, spec.Causal() & spec.Window(window))
    return {
        "every head its own keys": model(of(heads_of(heads), spec.Dense("gelu", 4 * width))),
        "grouped heads": model(of(heads_of(2))),
        "one pair of key and value": model(of(heads_of(1))),
        "a latent": model(of(latent)),
        "windows between full layers": model(of(heads_of(2)), of(near)),
        "experts": model(of(heads_of(2), spec.Experts(8, 2, spec.Gated("silu", width)))),
    }


def of_small(model: spec.Model, tokens: int, rows: int, generator: torch.Generator) -> Figures:
    """By part the bytes (promised, summed)."""
    promised = plan(model, context=tokens, concurrency=rows, weights="f32", kv="f32", memory=1 << 40)
    network = Transformer(model)
    initialise(network, generator)
    stack = model.trunk
    one_piece = ContiguousCache(stack, rows, tokens)
    found = {
        "weights": (promised.part("weights"), summed(network.parameters())),
        "cache": (cached(promised), in_blocks(stack, tokens, rows)),
        "training": (
            sum(p.bytes for p in training(model, 1, 1) if p.name in ("weights", "gradients", "optimiser")),
            after_a_step(network),
        ),
    }
    if all(mixer.mask.reach is None for _, mixer in kept(stack)):  # it has room for what windows forget
        bytes_ = rows * model.cache_bytes(tokens, bytes_per_value=4)
        found["cache in one piece"] = (bytes_, summed(t for held in one_piece.layers.values() for t in held))
    return {name: list(pair) for name, pair in found.items()}


def cached(promised: object) -> int:
    """Without what is taken ahead of need, and holds nothing."""
    parts = promised.parts  # type: ignore[attr-defined]
    return sum(p.bytes for p in parts if p.name.startswith("cache") and p.name != "cache, not yet used")


def summed(tensors: Iterable[Tensor]) -> int:
    """Bytes of all tensors, each once."""
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())


class Cleared(PagedCache):
    """Where there is no memory there is nothing to clear."""

    def clear(self, group: int, block: int) -> None:
        return


def in_blocks(stack: spec.Stack, tokens: int, rows: int, where: str = "cpu", chunk: int = 1) -> int:
    """The most bytes of blocks that so many sequences hold while their tokens come, `chunk` at a time."""
    reaches: dict[Reach, list[str]] = {}
    for name, mixer in kept(stack):
        reaches.setdefault(Reach(mixer.mask.reach), []).append(name)
    kind, dtype = (PagedCache, torch.float32) if where == "cpu" else (Cleared, torch.bfloat16)
    cache = kind(stack, list(reaches.values()), BLOCK, dtype, where)
    pools = [Pool(_as_memory(cache), number, reach) for number, reach in enumerate(reaches)]
    most = 0
    for end in range(chunk, tokens + chunk, chunk):
        for pool in pools:
            for row in range(rows):
                pool.hand_back(row, end - chunk)
                pool.extend(row, end - chunk, min(end, tokens))
        most = max(most, sum(held_bytes(cache, pool, rows) for pool in pools))
    return most


def _as_memory(cache: PagedCache) -> Memory:
    return cache


def held_bytes(cache: PagedCache, pool: Pool, rows: int) -> int:
    held = {block for row in range(rows) for block in pool.held(row)}
    return sum(len(held) * tensor[0].nbytes for _, both in cache.of(pool.group) for tensor in both)


def after_a_step(network: Transformer) -> int:
    """Bytes that one step of AdamW in mixed precision leaves: weights, gradients, fp32 copies, moments."""
    own = list(network.parameters())
    masters = [nn.Parameter(p.detach().clone()) for p in own]
    for p in own:
        p.data = p.data.to(torch.bfloat16)
        p.grad = torch.zeros_like(p)
    for master, p in zip(masters, own, strict=True):
        master.grad = p.grad.float() if p.grad is not None else None
    optimiser = torch.optim.AdamW(masters, foreach=False)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)  # fp32 gradients come and go, one tensor at a time
    moments = [t for state in optimiser.state.values() for t in state.values()]
    return summed([*own, *(p.grad for p in own if p.grad is not None), *masters, *moments])


def of_large(model: spec.Model, context: int) -> Figures:
    promised = plan(model, context=context, weights="bf16", kv="bf16", memory=1 << 50)
    with torch.device("meta"):
        network = Transformer(model).to(torch.bfloat16)
    size = in_blocks(model.trunk, context, 1, "meta", chunk=context)
    return {
        "weights": [promised.part("weights"), summed(network.parameters())],
        "cache": [cached(promised), size],
        "token": size / 1024 / (blocks(context) * BLOCK),
    }


def apart(pair: Sequence[float]) -> float:
    """How far the formula is from the sum, in per cent of the sum."""
    return 100 * abs(pair[0] / pair[1] - 1)


def worst(models: Mapping[str, Figures], part: str) -> float:
    return max(apart(model[part]) for model in models.values() if part in model)


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    small = tuple(
        within(
            f"small models: {part} by formula and summed are less than 1 % apart",
            [worst(each["small"], part) for each in figures],
            high=APART,
            form=".2g",
            unit=" % at most",
        )
        for part in PARTS
    )
    large = tuple(
        within(
            f"7 to 70 billion parameters: {part} by formula and summed are less than 1 % apart",
            [worst(each["large"], part) for each in figures],
            high=APART,
            form=".2g",
            unit=" % at most",
        )
        for part in ("weights", "cache")
    )
    return (*small, *large, published(figures))


def published(figures: Sequence[Figures]) -> Check:
    """The cache of a token as it is known of three models."""
    known = {name: LARGE[name][2] for name in figures[0]["large"]}
    found = {name: figures[0]["large"][name]["token"] for name in known}
    holds = all(
        abs(each["large"][name]["token"] / said - 1) < APART / 100
        for each in figures
        for name, said in known.items()
    )
    words = ", ".join(f"{name} {size:.5g} KiB" for name, size in found.items())
    what = ", ".join(f"{name} {said} KiB" for name, said in known.items())
    return Check(f"the cache of a token in 16 bits: {what}", words, holds)


def draw(figures: Sequence[Figures]) -> Pictures:
    rows = [
        Bar(part, [max(worst(each["small"], part), 1e-6) for each in figures], "small models")
        for part in PARTS
    ]
    rows += [
        Bar(part, [max(worst(each["large"], part), 1e-6) for each in figures], "7 to 70 billion parameters")
        for part in ("weights", "cache")
    ]
    axis = Axis("per cent", marks={"the bound": APART})
    return {"apart": picture(bars("Formula and summed bytes: how far apart at most", rows, axis))}
