"""What keys, values and states take: by kind of layer, in whole blocks, with beginnings that are shared."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from qkv.errors import RequestError
from qkv.planning.sizes import Part
from qkv.spec import Model
from qkv.spec.attention import Attention, CrossAttention, GatedDelta, LatentAttention, StateSpace
from qkv.spec.layers import Mixer

BLOCK = 16  # tokens, as qkv and most engines have it
VALUES = {"f32": (4.0, 0), "bf16": (2.0, 0), "f16": (2.0, 0), "fp8": (1.0, 0), "int8": (1.0, 4)}


@dataclass(frozen=True)
class Layers:
    """So many layers that keep alike. `per_token` are the bytes of one token in one of them.

    `reach` is how many of the latest tokens are kept, after the `first` ones (None: all). `fixed` are
    bytes of a sequence whatever its length.
    """

    kind: str
    count: int
    per_token: float = 0.0
    reach: int | None = None
    first: int = 0
    fixed: float = 0.0

    def held(self, tokens: int) -> int:
        """Tokens' room in blocks, of so many."""
        whole = blocks(tokens)
        if self.reach is not None:  # a window begins and ends anywhere within its blocks
            whole = min(whole, blocks(self.first) + blocks(self.reach) + 1)
        return whole * BLOCK

    def bytes(self, tokens: int) -> float:
        return self.count * (self.fixed + self.per_token * self.held(tokens))


def blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


def layers(model: Model, kv: str = "bf16", source: int = 0, devices: int = 1) -> list[Layers]:
    """The layers of a model's decoder that keep something, those alike together.

    `kv` is how values are kept; int8 has a scale of 4 bytes for each head and token, of keys and of
    values. Over several `devices` key/value heads are split, a head at least for each; latents and
    states are on every one. Raises RequestError for another `kv`.
    """
    if kv not in VALUES:
        raise RequestError(f"kv is {kv!r}; it can be {', '.join(VALUES)}.")
    if model.decoder is None:
        return []
    rows = model.encoder.input.rows(source) if model.encoder is not None and source else source
    found = Counter(
        each for mixer in model.decoder.mixers() if (each := _layer(mixer, kv, rows, devices)) is not None
    )
    return [Layers(e.kind, n, e.per_token, e.reach, e.first, e.fixed) for e, n in found.items()]


def _layer(mixer: Mixer, kv: str, source: int, devices: int) -> Layers | None:
    value, scale = VALUES[kv]
    if isinstance(mixer, GatedDelta | StateSpace):
        state, inputs = mixer.state_values()
        return Layers("state", 1, fixed=4 * state + value * inputs)
    if isinstance(mixer, LatentAttention):
        return Layers("latent", 1, value * mixer.cache_values(1, 0) + 2 * scale)
    if isinstance(mixer, Attention | CrossAttention):
        heads = -(-mixer.kv_heads // devices)
        size = heads * (value * (mixer.head_dim + (mixer.value_dim or mixer.head_dim)) + 2 * scale)
        if isinstance(mixer, CrossAttention):
            return Layers("cross", 1, fixed=size * blocks(source) * BLOCK)
        streaming, reach = mixer.mask.streaming, mixer.mask.reach
        first = streaming.first if streaming is not None else 0
        return Layers("full" if reach is None else f"window of {reach:,}", 1, size, reach, first)
    return None


def cache(kept: list[Layers], context: int, concurrency: int = 1, prefix: int = 0) -> tuple[Part, ...]:
    """What `concurrency` sequences of `context` tokens keep, of each kind of layer.

    They begin with `prefix` common tokens, whose whole blocks are kept once in layers that see all.
    """
    return tuple(_part(one, context, concurrency, prefix) for one in kept)


def _part(one: Layers, context: int, concurrency: int, prefix: int) -> Part:
    shared = prefix // BLOCK * BLOCK if one.reach is None and concurrency > 1 else 0
    alone = one.bytes(context)
    common = one.count * one.per_token * shared
    total = common + concurrency * (alone - common)
    many = f"{one.count:,} layer{'s' * (one.count != 1)}"
    if one.fixed and not one.per_token:
        formula = f"{many} x {one.fixed:,.0f} bytes"
    else:
        formula = f"{many} x {one.per_token:,.0f} bytes a token x {one.held(context):,} tokens in blocks"
    formula += f" x {concurrency:,}" if concurrency > 1 else ""
    formula += f", {shared:,} of them once" if shared else ""
    return Part(f"cache, {one.kind}", round(total), formula)


SEGMENT = 16 << 20  # bytes that the native runtime takes at once, at most


def rounding(kept: list[Layers], context: int, concurrency: int = 1, prefix: int = 0) -> Part:
    """What is taken before it is needed: memory grows by segments of a power of two of blocks."""
    groups: dict[tuple[int | None, int], float] = {}
    for one in kept:
        if one.per_token:
            key = one.reach, one.first
            groups[key] = groups.get(key, 0) + one.count * one.per_token * BLOCK
    total = 0.0
    for (reach, first), size in groups.items():
        segment = 1
        while segment < 1024 and 2 * segment * size <= SEGMENT:
            segment *= 2
        alone = Layers("", 1, 1, reach, first).held(context) // BLOCK
        shared = prefix // BLOCK if reach is None and concurrency > 1 else 0
        taken = shared + concurrency * (alone - shared)
        total += size * (-taken % segment)
    return Part("cache, not yet used", round(total), "memory comes in segments of up to 16 MiB")


def read(kept: list[Layers], context: int) -> float:
    """Bytes of its cache that a token's step reads."""
    return sum(
        one.count
        * (one.fixed + one.per_token * (min(context, one.first + one.reach) if one.reach else context))
        for one in kept
    )
