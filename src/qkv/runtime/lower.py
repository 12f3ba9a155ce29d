"""From a description to programs: each part becomes a few operations, or is refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qkv import spec
from qkv.runtime.emitter import Emitter, Into, Unexpressed, only
from qkv.runtime.mixers import keys_and_values, linear, mixer
from qkv.runtime.program import Activate, Add, Program, ScaleCap, Sinusoids, Span, TakeRows
from qkv.spec.heads import Head
from qkv.spec.inputs import Input


@dataclass(frozen=True)
class Lowered:
    """The programs of a model.

    `main` is the stack that answers. `source` is the encoder of an encoder-decoder; it ends by
    storing, for every cross-attention, the keys and values that `main` reads.
    """

    main: Program
    source: Program | None = None


def lower(model: spec.Model) -> Lowered:
    """The programs of a description; UnsupportedError names what the operations do not express."""
    only(model, "the model", "encoder", "decoder", "head")
    first: dict[str, str] = {}
    stored = {tensor.name: first.setdefault(tensor.key, tensor.name) for tensor in model.tensors()}
    if model.encoder is not None and model.decoder is not None:
        main = _main(stored, "decoder", model.decoder, model.head)
        return Lowered(main, _source(stored, model.encoder, model.decoder))
    return Lowered(_main(stored, "encoder" if model.decoder is None else "decoder", model.trunk, model.head))


def _main(stored: Mapping[str, str], side: str, stack: spec.Stack, head: Head | None) -> Program:
    """The stack, then the head on the rows whose answer is wanted."""
    emit = Emitter(stored)
    stream = _layers(emit, side, stack)
    wanted = emit.pick(stream)
    emit.norm(stack.norm, f"{side}.norm", wanted, wanted)
    return emit.done(wanted if head is None else _head(emit, head, wanted))


def _source(stored: Mapping[str, str], encoder: spec.Stack, decoder: spec.Stack) -> Program:
    """The encoder, then what each cross-attention of the decoder keeps of its rows."""
    emit = Emitter(stored)
    stream = _layers(emit, "encoder", encoder)
    emit.norm(encoder.norm, "encoder.norm", stream, stream)
    for i, layer in enumerate(decoder.layers):
        for name, node in layer.mixers():
            if isinstance(node, spec.CrossAttention):
                keys_and_values(emit, node, f"decoder.layers.{i}.{name}", f"decoder.{i}.{name}", stream)
    return emit.done(stream)


def _layers(emit: Emitter, side: str, stack: spec.Stack) -> Span:
    only(stack, side, "input", "layers", "norm")
    stream = _input(emit, stack.input, f"{side}.embedding")
    for i, layer in enumerate(stack.layers):
        _layer(emit, layer, f"{side}.layers.{i}", f"{side}.{i}", stream)
    return stream


def _input(emit: Emitter, node: Input, place: str) -> Span:
    """scale * table[token] + position + type, normalised, then projected, each where there is one."""
    if not isinstance(node, spec.Tokens):
        raise Unexpressed(place, type(node).__name__)
    only(node, place, "vocab", "width", "scale", "position", "types", "norm", "projection", "table_width")
    plain = node.projection is None
    out = emit.buffer("stream" if plain else "narrow", node.width)
    if node.table_width:
        rows = emit.buffer("rows", node.table_width)
        emit.emit(TakeRows(rows, emit.name(f"{place}.weight"), scale=node.scale))
        linear(emit, out, rows, f"{place}.widen")
    else:
        emit.emit(TakeRows(out, emit.name(f"{place}.weight"), scale=node.scale))
    position = node.position
    if isinstance(position, spec.Learned):
        table = emit.name(f"{place}.position.weight")
        emit.emit(TakeRows(out, table, "position", offset=position.offset, add=True))
    elif isinstance(position, spec.Sinusoidal):
        emit.emit(Sinusoids(out, position.base, position.layout))
    elif position is not None:
        raise Unexpressed(place, f"{type(position).__name__} positions")
    if node.types:
        emit.emit(TakeRows(out, emit.name(f"{place}.types.weight"), "type", add=True))
    emit.norm(node.norm, f"{place}.norm", out, out)
    return (
        out
        if node.projection is None
        else _project(emit, node.projection, f"{place}.projection", out, "stream")
    )


def _project(emit: Emitter, node: spec.Project, place: str, x: Span, buffer: str) -> Span:
    only(node, place, "width", "bias", "activation", "norm")
    out = linear(emit, emit.buffer(buffer, node.width), x, f"{place}.linear")
    if node.activation is not None:
        emit.emit(Activate(out, node.activation))
    return emit.norm(node.norm, f"{place}.norm", out, out)


def _layer(emit: Emitter, layer: spec.Layer, place: str, slot: str, stream: Span) -> None:
    """x <- post(skip * x + scale * after(sum of branch_i(norm_i(before(x))))) for each step in turn."""
    width = stream.width
    for step, name, branches in layer.named():
        only(step, place, "branches", "before", "after", "post", "skip", "scale")
        normed = stream if step.before is None else emit.buffer("normed", width)
        read = emit.norm(step.before, f"{place}.{name}_before", stream, normed)
        # straight into the stream, unless something comes between or a later branch still reads it
        apart = step.after is not None or step.skip != 1 or (len(branches) > 1 and read == stream)
        total = emit.buffer("sum", width) if apart else stream
        for number, (branch_name, branch) in enumerate(branches):
            only(branch, place, "mixer", "norm")
            own = read if branch.norm is None else emit.buffer("own", width)
            inputs = emit.norm(branch.norm, f"{place}.{branch_name}_norm", read, own)
            into = Into(total, number > 0) if apart else Into(total, True, step.scale)
            mixer(emit, branch.mixer, f"{place}.{branch_name}", f"{slot}.{branch_name}", inputs, into)
        if apart:
            emit.norm(step.after, f"{place}.{name}_after", total, total)
            emit.emit(Add(stream, total, step.scale, step.skip))
        emit.norm(step.post, f"{place}.{name}_post", stream, stream)


def _head(emit: Emitter, head: Head, x: Span) -> Span:
    if not isinstance(head, spec.Language):
        raise Unexpressed("head", type(head).__name__)
    only(head, "head", "vocab", "bias", "scale", "cap", "transform")
    if head.transform is not None:
        x = _project(emit, head.transform, "head.transform", x, "transformed")
    logits = linear(emit, emit.buffer("logits", head.vocab), x, "head")
    if head.scale != 1 or head.cap is not None:
        emit.emit(ScaleCap(logits, head.scale, head.cap))
    return logits
