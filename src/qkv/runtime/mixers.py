"""Lowering the mixers: what each becomes, from the rows it reads to where it leaves its output."""

from __future__ import annotations

from typing import Any, cast

from qkv import spec
from qkv.runtime.emitter import Emitter, Into, Unexpressed, only
from qkv.runtime.program import (
    Activate,
    Add,
    Attend,
    Clamp,
    Combine,
    ExpertLinear,
    Linear,
    Multiply,
    Rotate,
    Route,
    Sight,
    Slot,
    Span,
    Store,
)
from qkv.spec.feed_forward import Activation
from qkv.spec.layers import Mixer

SIZES = ("heads", "kv_heads", "head_dim", "value_dim")
GROUPS = ("groups", "top_groups", "group_best")
MOST_FIRST = 128  # first keys that are read beside a window, in one go


def mixer(emit: Emitter, node: Mixer, place: str, slot: str, read: Span, into: Into) -> None:
    """The operations of one mixer. `place` begins its parameters' names, `slot` names its cache."""
    if isinstance(node, spec.Attention):
        attention(emit, node, place, slot, read, into)
    elif isinstance(node, spec.CrossAttention):
        cross_attention(emit, node, place, slot, read, into)
    elif isinstance(node, spec.Dense | spec.Gated):
        feed_forward(emit, node, place, read, into)
    elif isinstance(node, spec.Experts):
        experts(emit, node, place, read, into)
    else:
        raise Unexpressed(place, type(node).__name__)


def linear(emit: Emitter, out: Span, x: Span, *places: str, gate: Activation | None = None) -> Span:
    """out = x times the matrices of these places, side by side; or gated, where they are two."""
    biases = tuple(emit.maybe(f"{place}.bias") for place in places)
    matrices = tuple(emit.name(f"{place}.weight") for place in places)
    emit.emit(Linear(out, x, matrices, biases if any(biases) else (), gate=gate))
    return out


def leave(emit: Emitter, into: Into, x: Span, place: str) -> None:
    """The last map of a mixer, into its place."""
    bias = emit.maybe(f"{place}.bias")
    matrices, biases = (emit.name(f"{place}.weight"),), (bias,) if bias else ()
    emit.emit(Linear(into.out, x, matrices, biases, into.add, into.scale))


def attention(emit: Emitter, node: spec.Attention, place: str, slot: str, read: Span, into: Into) -> None:
    only(node, place, *SIZES, "score", "position", "mask", "projections")
    heads, kv_heads, head_dim = node.heads, node.kv_heads, node.head_dim
    value_dim = node.value_dim or head_dim
    score, through = _score(node, place), node.projections
    widths = heads * head_dim, kv_heads * head_dim, kv_heads * value_dim
    made = emit.buffer("projected", sum(widths))
    query, key = made.part(0, widths[0]), made.part(widths[0], widths[1])
    value = made.part(widths[0] + widths[1], widths[2])
    linear(emit, made, read, f"{place}.query", f"{place}.key", f"{place}.value")
    if through.clip is not None:
        emit.emit(Clamp(made, through.clip))
    streaming, far = node.mask.streaming, None
    for late in (False, True):
        if through.norm_after_rotation == late:
            _head_norms(emit, node, place, query, key)
            if late and far is not None:
                _head_norms(emit, node, place, far, None)
        if not late and isinstance(node.position, spec.Rotary):
            if streaming is not None:  # as the first keys meet it
                far = emit.buffer("far", widths[0])
                most = streaming.first + streaming.window - 1
                emit.emit(Rotate(far, heads, *_turns(node, place), x=query, most=most))
            for span, count in ((query, heads), (key, kv_heads)):
                emit.emit(Rotate(span, count, *_turns(node, place)))
    emit.slots[slot] = Slot(kv_heads, head_dim, value_dim)
    emit.emit(Store(slot, key, value))
    attended = emit.buffer("attended", heads * value_dim)
    emit.emit(
        Attend(
            attended,
            query,
            slot,
            heads,
            kv_heads,
            head_dim**-0.5 if score.scale is None else score.scale,
            sight(node.mask, place),
            score.cap,
            emit.maybe(f"{place}.sink"),
            **_bias(emit, node, place),
            far=far,
        )
    )
    _gate(emit, node, place, read, attended)
    leave(emit, into, attended, f"{place}.output")


def cross_attention(
    emit: Emitter, node: spec.CrossAttention, place: str, slot: str, read: Span, into: Into
) -> None:
    only(node, place, *SIZES, "source_width", "score", "mask", "projections")
    score, through = _score(node, place), node.projections
    query = linear(emit, emit.buffer("projected", node.heads * node.head_dim), read, f"{place}.query")
    if through.clip is not None:
        emit.emit(Clamp(query, through.clip))
    _head_norms(emit, node, place, query, None)
    emit.slots[slot] = _slot(node)
    attended = emit.buffer("attended", node.heads * (node.value_dim or node.head_dim))
    scale = node.head_dim**-0.5 if score.scale is None else score.scale
    seen, sink = sight(node.mask, place), emit.maybe(f"{place}.sink")
    emit.emit(Attend(attended, query, slot, node.heads, node.kv_heads, scale, seen, score.cap, sink))
    _gate(emit, node, place, read, attended)
    leave(emit, into, attended, f"{place}.output")


def keys_and_values(emit: Emitter, node: spec.CrossAttention, place: str, slot: str, read: Span) -> None:
    """What cross-attention keeps of the rows it reads."""
    size, through = _slot(node), node.projections
    widths = size.kv_heads * size.head_dim, size.kv_heads * size.value_dim
    made = emit.buffer("projected", sum(widths))
    key, value = made.part(0, widths[0]), made.part(*widths)
    linear(emit, made, read, f"{place}.key", f"{place}.value")
    if through.clip is not None:
        emit.emit(Clamp(made, through.clip))
    _head_norms(emit, node, place, None, key)
    emit.slots[slot] = size
    emit.emit(Store(slot, key, value))


def _slot(node: spec.CrossAttention) -> Slot:
    return Slot(node.kv_heads, node.head_dim, node.value_dim or node.head_dim)


def _score(node: spec.Attention | spec.CrossAttention, place: str) -> spec.Score:
    if type(node.score) not in (spec.Score, spec.Dot):
        raise Unexpressed(place, f"a {type(node.score).__name__} score")
    only(node.score, place, "scale", "cap", "sink")
    only(node.projections, place, "bias", "clip", "norm", "norm_over", "norm_after_rotation", "gate")
    return node.score


def _head_norms(
    emit: Emitter,
    node: spec.Attention | spec.CrossAttention,
    place: str,
    query: Span | None,
    key: Span | None,
) -> None:
    through = node.projections
    for name, span, heads in (("query_norm", query, node.heads), ("key_norm", key, node.kv_heads)):
        if span is not None:
            groups = 1 if through.norm_over == "all" else heads
            emit.norm(through.norm, f"{place}.{name}", span, span, groups)


def _turns(node: spec.Attention, place: str) -> tuple[tuple[float, ...], float, Any]:
    """Frequencies, factor and pairs of a rotation."""
    position = cast(spec.Rotary, node.position)
    if isinstance(position.scaling, spec.DynamicNTK | spec.LongRope):
        raise Unexpressed(place, "a rotation that depends on the length")
    only(position, place, "theta", "dims", "pairs", "scaling", "axes")  # all axes are the position here
    frequencies, factor = position.frequencies(node.head_dim, 0)
    return tuple(float(f) for f in frequencies), factor, position.pairs


def _bias(emit: Emitter, node: spec.Attention, place: str) -> dict[str, Any]:
    """What a position scheme adds to the scores, as fields of Attend."""
    position = node.position
    if position is None or isinstance(position, spec.Rotary):
        return {}
    if isinstance(position, spec.Alibi):
        return {"slopes": tuple(float(slope) for slope in position.slopes(node.heads))}
    if isinstance(position, spec.Buckets):
        table = emit.name(f"{place}.position.weight")
        return {"buckets": table, "starts": position.starts(), "both": position.bidirectional}
    raise Unexpressed(place, f"{type(position).__name__} positions")


def _gate(
    emit: Emitter, node: spec.Attention | spec.CrossAttention, place: str, read: Span, heads: Span
) -> None:
    if node.projections.gate is not None:
        gate = linear(emit, emit.buffer("gate", heads.width), read, f"{place}.gate")
        emit.emit(Activate(gate, node.projections.gate))
        emit.emit(Multiply(heads, gate))


def sight(mask: spec.Mask, place: str) -> Sight:
    """The run of keys a mask shows a query, where it is one run."""
    if isinstance(mask, spec.Everything):
        return Sight()
    if isinstance(mask, spec.Causal):
        return Sight(after=0)
    if isinstance(mask, spec.Window):
        return Sight(mask.before, mask.after)
    if isinstance(mask, spec.Streaming):
        if mask.first > MOST_FIRST:
            raise Unexpressed(place, f"more than {MOST_FIRST} first keys beside a window")
        return Sight(mask.window, first=mask.first)
    if isinstance(mask, spec.Chunk):
        return Sight(chunk=mask.size)
    if isinstance(mask, spec.And):
        both = _both(sight(mask.left, place), sight(mask.right, place))
        if both is not None:
            return both
    raise Unexpressed(place, f"the mask {mask}")


def _both(left: Sight, right: Sight) -> Sight | None:
    """What both show, if it is one run; first keys stay beside a window that nothing else narrows."""
    if left.chunk is not None and right.chunk is not None:
        return None
    for one, other in ((left, right), (right, left)):
        if one.first and (other.first or other.before is not None or other.chunk is not None):
            return None
    before, after = _least(left.before, right.before), _least(left.after, right.after)
    return Sight(before, after, left.chunk or right.chunk, left.first + right.first)


def _least(a: int | None, b: int | None) -> int | None:
    return min((n for n in (a, b) if n is not None), default=None)


def feed_forward(emit: Emitter, node: spec.Dense | spec.Gated, place: str, read: Span, into: Into) -> None:
    only(node, place, "activation", "hidden", "bias")
    hidden = emit.buffer("hidden", node.hidden)
    if isinstance(node, spec.Gated):
        linear(emit, hidden, read, f"{place}.gate", f"{place}.up", gate=node.activation)
    else:
        linear(emit, hidden, read, f"{place}.up")
        emit.emit(Activate(hidden, node.activation))
    leave(emit, into, hidden, f"{place}.down")


def experts(emit: Emitter, node: spec.Experts, place: str, read: Span, into: Into) -> None:
    router = node.router
    only(node, place, "count", "top_k", "expert", "router", "shared_expert", "shared_gate")
    only(
        router, place, "score", "normalise", "scale", "bias", "balance", "groups", "top_groups", "group_best"
    )
    bias, balance = emit.maybe(f"{place}.router.bias"), emit.maybe(f"{place}.router.balance")
    emit.emit(Route("picks", read, router, node.top_k, emit.name(f"{place}.router.weight"), bias, balance))
    only(node.expert, place, "activation", "hidden", "bias")
    hidden = emit.buffer("hidden", node.top_k * node.expert.hidden)
    outputs = emit.buffer("outputs", node.top_k * into.out.width)
    gated = isinstance(node.expert, spec.Gated)
    first = (f"{place}.expert.gate", f"{place}.expert.up") if gated else (f"{place}.expert.up",)
    _expert_linear(emit, hidden, read, first, node.expert.activation if gated else None)
    if not gated:
        emit.emit(Activate(hidden, node.expert.activation))
    _expert_linear(emit, outputs, hidden, (f"{place}.expert.down",), None, from_picks=True)
    emit.emit(Combine(into.out, outputs, "picks", into.add, into.scale))
    if node.shared_expert is not None:
        shared = emit.buffer("outputs", into.out.width)
        feed_forward(emit, node.shared_expert, f"{place}.shared_expert", read, Into(shared))
        if node.shared_gate:
            gate = linear(emit, emit.buffer("gate", 1), read, f"{place}.shared_gate")
            emit.emit(Activate(gate, "sigmoid"))
            emit.emit(Multiply(shared, gate))
        emit.emit(Add(into.out, shared, into.scale))


def _expert_linear(
    emit: Emitter,
    out: Span,
    x: Span,
    places: tuple[str, ...],
    gate: Activation | None,
    from_picks: bool = False,
) -> None:
    matrices = tuple(emit.name(f"{place}.weight") for place in places)
    biases = tuple(emit.maybe(f"{place}.bias") for place in places)
    emit.emit(ExpertLinear(out, x, "picks", matrices, biases if any(biases) else (), gate, from_picks))
