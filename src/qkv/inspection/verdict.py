"""The context a model really supports: what is a limit, what was trained, what was only configured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from qkv.inspection.places import places
from qkv.spec import (
    Alibi,
    And,
    Attention,
    Buckets,
    Chunk,
    DynamicNTK,
    Frames,
    Interpolation,
    LatentAttention,
    Learned,
    Llama3,
    LongRope,
    Mask,
    Model,
    Or,
    Proportional,
    Rotary,
    Scaling,
    Stack,
    Yarn,
)

NOT_SET = 1e20  # tokenizers without a limit of their own are saved with 1e30


@dataclass(frozen=True)
class Length:
    """A number of positions and where it comes from."""

    positions: int
    evidence: str


@dataclass(frozen=True)
class Verdict:
    """What the files say of the context, each number with its evidence.

    `hard`: past it there is no row to look up. `trained`: the length of training. `configured`:
    what the configuration extends it to, without further steps. `opt_in`: reached only by adding
    a scaling by hand. `regime_change`: the first length at which frequencies change. `windows`:
    layers that see only some of the latest keys, as ("window" or
    "chunk", keys, layers). `reach`: how far a token's influence can
    travel where every layer has a window.
    """

    hard: Length | None = None
    trained: Length | None = None
    configured: Length | None = None
    opt_in: Length | None = None
    regime_change: Length | None = None
    windows: tuple[tuple[str, int, tuple[int, ...]], ...] = ()
    reach: int | None = None
    tokenizer: int | None = None
    notes: tuple[str, ...] = ()
    contradictions: tuple[str, ...] = ()
    layers: int = 0

    def lines(self) -> Iterator[str]:
        """In plain words, most binding first."""
        if self.hard:
            yield f"hard limit {self.hard.positions:,} ({self.hard.evidence})"
        elif self.layers:
            yield "no hard limit in the weights"
        if self.trained:
            before = " before its positions were scaled" if self.configured else ""
            yield f"trained to {self.trained.positions:,}{before} ({self.trained.evidence})"
        if self.configured:
            yield f"extended by configuration to {self.configured.positions:,} ({self.configured.evidence})"
        if self.opt_in:
            yield f"opt-in: {self.opt_in.positions:,} ({self.opt_in.evidence})"
        if self.regime_change:
            yield f"regime change at {self.regime_change.positions:,}: {self.regime_change.evidence}"
        for kind, window, layers in self.windows:
            yield f"{kind} of {window:,} keys in {places(layers, self.layers)}"
        if self.reach:
            yield f"reach through all windows together: {self.reach:,} positions"
        yield from self.notes
        for contradiction in self.contradictions:
            yield f"contradiction: {contradiction}"


@dataclass
class _Draft:
    """A verdict being put together."""

    parts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    contradictions: list[str] = field(default_factory=list)


def verdict(
    model: Model,
    context: int | None,
    *,
    tokenizer: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    key: str = "max_position_embeddings",
) -> Verdict:
    """From a description, the positions its files promise, and what the tokenizer's file says.

    `key` names where `context` was read, `config` is the file it was read from.
    """
    stack, draft = model.trunk, _Draft()
    _table(stack, draft)
    if model.encoder is not None and model.encoder is not stack:
        _encoder(model.encoder, draft)
    positions = [m.position for m in stack.mixers() if isinstance(m, Attention | LatentAttention)]
    rotaries = dict.fromkeys(p for p in positions if isinstance(p, Rotary))
    if rotaries:
        scalings = [r.scaling for r in rotaries if _stretches(r.scaling)]
        _rotary(scalings[0] if scalings else None, context, key, draft)
        unscaled = sum(isinstance(p, Rotary) and not _stretches(p.scaling) for p in positions)
        if scalings and unscaled:
            draft.notes.append(f"{unscaled} of {len(positions)} attention layers rotate without the scaling")
    elif any(isinstance(p, Alibi) for p in positions) and context:
        draft.parts["trained"] = Length(context, f"{key}; ALiBi has no limit of its own")
    elif buckets := next((p for p in positions if isinstance(p, Buckets)), None):
        _buckets(buckets, context, key, draft)
    elif context and positions and not any(positions) and stack.input.position is None:
        draft.parts["trained"] = Length(context, f"{key}; there are no positions to run out of")
    unplaced = sum(p is None for p in positions)
    if rotaries and unplaced:
        draft.notes.append(f"{unplaced} of {len(positions)} attention layers have no positions")
    _windows(stack, config or {}, draft)
    _tokenizer(tokenizer, draft)
    return Verdict(
        **draft.parts,
        notes=tuple(draft.notes),
        contradictions=tuple(draft.contradictions),
        layers=len(stack.layers),
    )


def _stretches(scaling: Scaling | None) -> bool:
    """Whether angles are slowed; a share of pairs that stands still is as it was trained."""
    return scaling is not None and not (isinstance(scaling, Proportional) and scaling.factor == 1)


def _table(stack: Stack, draft: _Draft) -> None:
    position = getattr(stack.input, "position", None)
    if isinstance(position, Learned):
        rows = position.rows - position.offset
        offset = f" less an offset of {position.offset}" if position.offset else ""
        draft.parts["hard"] = Length(rows, f"{position.rows:,} rows in the position table{offset}")
        draft.parts["trained"] = Length(rows, "the table's rows")


def _encoder(stack: Stack, draft: _Draft) -> None:
    """What the encoder of a pair can read at most, or how far it tells distances apart."""
    table = stack.input.position
    if isinstance(table, Learned):
        rows, each = table.rows - table.offset, 1
        if isinstance(stack.input, Frames):
            each = math.prod(stack.input.strides)
        frames = f", {rows * each:,} frames" if each > 1 else ""
        draft.notes.append(f"the encoder reads at most {rows:,} rows{frames} (its position table)")
    positions = (mixer.position for mixer in stack.mixers() if isinstance(mixer, Attention))
    buckets = next((position for position in positions if isinstance(position, Buckets)), None)
    if buckets is not None:
        draft.notes.append(_last_bucket(buckets))


def _rotary(scaling: Scaling | None, context: int | None, key: str, draft: _Draft) -> None:
    if context is None:
        draft.notes.append("the files promise no length")
    elif scaling is None:
        draft.parts["trained"] = Length(context, f"{key}, no scaling")
    else:
        SCALED.get(type(scaling), _unknown)(scaling, context, key, draft)


def _yarn(scaling: Yarn, context: int, key: str, draft: _Draft) -> None:
    extended = round(scaling.original * scaling.factor)
    draft.parts["trained"] = Length(scaling.original, "original_max_position_embeddings")
    draft.parts["configured"] = Length(extended, f"YaRN x{scaling.factor:g} of {scaling.original:,}")
    if context not in (extended, scaling.original):
        draft.contradictions.append(
            f"{key} says {context:,}, YaRN x{scaling.factor:g} of {scaling.original:,} gives {extended:,}"
        )


def _already_extended(scaling: Any, context: int, key: str, draft: _Draft) -> None:
    """Llama 3 and LongRoPE: the promised length holds the extension already."""
    name = {"Llama3": "Llama-3 scaling", "LongRope": "LongRoPE"}.get(type(scaling).__name__, "scaling")
    draft.parts["trained"] = Length(scaling.original, "original_max_position_embeddings")
    if context > scaling.original:
        draft.parts["configured"] = Length(context, f"{key}, {name}")
    if isinstance(scaling, LongRope) and scaling.short != scaling.long:
        draft.parts["regime_change"] = Length(
            scaling.original + 1, "other factors from there on; keys cached before it are stale"
        )


def _dynamic(scaling: DynamicNTK, context: int, key: str, draft: _Draft) -> None:
    draft.parts["trained"] = Length(scaling.original, key)
    draft.parts["configured"] = Length(
        round(scaling.original * scaling.factor), f"dynamic NTK x{scaling.factor:g}"
    )
    draft.parts["regime_change"] = Length(
        scaling.original + 1, "the base grows with the length from there on"
    )


def _linear(scaling: Interpolation, context: int, key: str, draft: _Draft) -> None:
    draft.parts["configured"] = Length(context, f"{key}, with angles divided by {scaling.factor:g}")
    draft.notes.append(
        f"the files do not say whether {context:,} holds the factor {scaling.factor:g} already"
    )


def _unknown(scaling: Scaling, context: int, key: str, draft: _Draft) -> None:
    draft.parts["configured"] = Length(context, f"{key}, {type(scaling).__name__}")


SCALED: dict[type[Scaling], Any] = {
    Yarn: _yarn,
    Llama3: _already_extended,
    LongRope: _already_extended,
    DynamicNTK: _dynamic,
    Interpolation: _linear,
}


def _buckets(position: Buckets, context: int | None, key: str, draft: _Draft) -> None:
    if context:
        draft.parts["trained"] = Length(context, key)
    draft.notes.append(_last_bucket(position))


def _last_bucket(position: Buckets) -> str:
    last, count = last_bucket_start(position), position.buckets
    if position.bidirectional:
        return f"encoder: distances from {last:,} on share the last of {count // 2} buckets on either side"
    return f"decoder: distances from {last:,} on share the last of {count} buckets"


def last_bucket_start(position: Buckets) -> int:
    """The first distance that falls into T5's last bucket."""
    buckets = position.buckets // 2 if position.bidirectional else position.buckets
    exact = buckets // 2
    distance = exact
    while distance < position.max_distance:
        ratio = math.log(distance / exact) / math.log(position.max_distance / exact)
        if exact + int(ratio * (buckets - exact)) >= buckets - 1:
            break
        distance += 1
    return distance


def _windows(stack: Stack, config: Mapping[str, Any], draft: _Draft) -> None:
    found: dict[tuple[str, int], list[int]] = {}
    attended = 0
    for i, layer in enumerate(stack.layers):
        for _, mixer in layer.mixers():
            if isinstance(mixer, Attention):
                attended += 1
                if (reach := mixer.mask.reach) is not None:
                    found.setdefault(("chunk" if _chunked(mixer.mask) else "window", reach), []).append(i)
    draft.parts["windows"] = tuple((kind, keys, tuple(layers)) for (kind, keys), layers in found.items())
    windowed = sum(map(len, found.values()))
    if windowed and windowed == attended:
        draft.parts["reach"] = 1 + sum((keys - 1) * len(layers) for (_, keys), layers in found.items())
    unused = config.get("sliding_window")
    if not found and isinstance(unused, int):
        off = config.get("use_sliding_window") is False
        why = "use_sliding_window is false" if off else "it is not below the context"
        draft.notes.append(f"sliding_window {unused:,} has no effect: {why}")


def _chunked(mask: Mask) -> bool:
    if isinstance(mask, And | Or):
        return _chunked(mask.left) or _chunked(mask.right)
    return isinstance(mask, Chunk)


def _tokenizer(data: Mapping[str, Any] | None, draft: _Draft) -> None:
    """A tokenizer's limit is a default for cutting text: evidence, not a limit of the model."""
    limit = (data or {}).get("model_max_length")
    if not isinstance(limit, int | float) or limit >= NOT_SET:
        return
    draft.parts["tokenizer"] = int(limit)
    shipped = draft.parts.get("configured") or draft.parts.get("trained")
    if shipped is None or int(limit) == shipped.positions:
        return
    if limit > shipped.positions and "hard" not in draft.parts and "configured" not in draft.parts:
        factor = limit / shipped.positions
        draft.parts["opt_in"] = Length(
            int(limit), f"the tokenizer's model_max_length; needs a scaling of x{factor:.3g} added by hand"
        )
    else:
        draft.contradictions.append(
            f"the tokenizer's model_max_length says {int(limit):,}, the configuration {shipped.positions:,}"
        )
