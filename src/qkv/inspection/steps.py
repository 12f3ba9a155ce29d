"""The order in which to read a model: eight steps, in plain words, with figures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from qkv.inspection.places import places
from qkv.inspection.verdict import Verdict
from qkv.inspection.words import (
    added_words,
    attention_words,
    bytes_words,
    convolution_words,
    feed_forward_words,
    layer_words,
    mask_words,
    norm_words,
    number,
    position_words,
    project_words,
    scale_of_embedding,
    share_words,
    tower_name,
)
from qkv.spec import Attention, CrossAttention, Frames, LatentAttention, Model, Patches, Stack, Tokens
from qkv.spec.heads import (
    Language,
    MaskedLanguage,
    MultiToken,
    Pool,
    PooledEmbedding,
    SequenceClass,
    Span,
    TokenClass,
)
from qkv.spec.layers import Mixer
from qkv.spec.model import Replace, Tower


@dataclass(frozen=True)
class Step:
    """One of the eight: its number, its name, and what it says, a line each."""

    number: int
    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Subject:
    """What the steps read.

    `tokenizer` and `packed` are lines about the tokenizer's own files and about how weights are
    stored; `further` counts layers in the files that guess ahead and are not described.
    """

    model: Model
    verdict: Verdict
    context: int | None
    tokenizer: str | None = None
    packed: str | None = None
    further: int = 0


def steps(subject: Subject) -> tuple[Step, ...]:
    """All eight, in order."""
    titles = ("Tokens", "Size", "Attention", "Positions", "Block", "Visibility", "Head", "Serving")
    read = (_tokens, _size, _attention, _positions, _block, _visibility, _head, _serving)
    return tuple(
        Step(i + 1, title, tuple(one(subject)))
        for i, (title, one) in enumerate(zip(titles, read, strict=True))
    )


def stacks(model: Model) -> list[tuple[str, Stack]]:
    """The stacks with the names to tell them apart; a lone one needs none."""
    sides = [("encoder", model.encoder), ("decoder", model.decoder)]
    found = [(name, stack) for name, stack in sides if stack is not None]
    found = found if len(found) > 1 else [("", stack) for _, stack in found]
    return [*found, *((tower_name(tower.stack.input), tower.stack) for tower in model.towers)]


def _each(model: Model) -> Iterator[tuple[str, Stack]]:
    """Stacks with a prefix for a line."""
    for name, stack in stacks(model):
        yield (f"{name}: " if name else ""), stack


def _tokens(subject: Subject) -> Iterator[str]:
    model, tables = subject.model, set[str | None]()
    for prefix, stack in _each(model):
        match stack.input:
            case Tokens() as tokens:
                vector = tokens.table_width or tokens.width
                again = tokens.shared in tables - {None}
                tables.add(tokens.shared)
                shape = f"{tokens.vocab:,} entries, each a vector of {vector:,}"
                yield f"{prefix}the same table" if again else f"{prefix}{shape}"
                if tokens.scale != 1:
                    yield f"{prefix}{scale_of_embedding(tokens)}"
                if tokens.types:
                    yield f"{prefix}{tokens.types} token types"
            case Patches() as patches:
                rows = patches.rows(0)
                height, width = patches.image
                yield f"{prefix}images of {height} x {width} in patches of {patches.size}: {rows:,} rows"
            case Frames() as frames:
                every = math.prod(frames.strides)
                yield f"{prefix}audio of {frames.channels} bins, one row every {every} frames"
                yield f"{prefix}{convolution_words(frames)}"
    for tower in model.towers:
        yield f"{tower_name(tower.stack.input)}: {joining_words(tower)}"
    if subject.tokenizer:
        yield subject.tokenizer


def joining_words(tower: Tower) -> str:
    """How many rows of a tower get where."""
    stack, projector, pool = tower.stack, tower.projector, 1
    rows = stack.input.rows(0) - tower.first_row
    words = []
    if tower.take_layer != -1:
        depth = len(stack.layers)
        words.append(f"rows after {tower.take_layer % (depth + 1)} of {depth} layers")
    if projector is not None:
        pool = projector.pool * projector.merge
        if pool > 1:
            side = math.isqrt(pool)
            square = f"{side} x {side}" if side * side == pool else f"{pool}"
            words.append(f"{square} rows {'averaged' if projector.pool > 1 else 'side by side'}")
        words += [norm_words(projector.norm)] if projector.norm is not None else []
        words += [project_words(project) for project in projector.maps]
    where = f"in place of token {tower.join.token:,}" if isinstance(tower.join, Replace) else "for reading"
    return ", ".join([*words, f"{rows // pool:,} rows {where}"])


def _size(subject: Subject) -> Iterator[str]:
    model = subject.model
    for prefix, stack in _each(model):
        yield f"{prefix}{len(stack.layers)} layers, width {stack.width:,}"
    if subject.further:
        yield f"the configuration names {subject.further} more for guessing ahead (MTP), not counted here"
    total, active = model.parameters(), model.parameters(active=True)
    if active != total:
        least = model.parameters(active=True, embedding=False)
        without = f" ({least:,} without the input table)" if least != active else ""
        yield f"{total:,} parameters, {active:,} of them used by a token{without}"
    yield "parameters: " + ", ".join(f"{share_words(size / total)} {name}" for name, size in parts(model))
    if subject.packed:
        yield subject.packed


def parts(model: Model) -> list[tuple[str, int]]:
    """Parameters by part, shared ones once, the largest first."""
    names = {
        "feed_forward": "feed-forward",
        "attention": "attention",
        "cross": "cross-attention",
        "mixer": "mixers",
    }
    sums: dict[str, int] = {}
    for tensor in model.weights().values():
        pieces = tensor.name.split(".")
        part = "norms and small parts"
        if pieces[0] == "towers":
            part = "towers"
        elif pieces[0] == "head":
            part = "head"
        elif pieces[1] == "embedding":
            part = "embedding"
        elif pieces[1] == "layers":
            role = pieces[3].rstrip("_0123456789")
            part = names.get(role, part)
        sums[part] = sums.get(part, 0) + tensor.size
    return sorted(sums.items(), key=lambda item: -item[1])


def by_layer(stack: Stack) -> list[tuple[str, Mixer, list[int]]]:
    """Every distinct mixer with the layers it stands in."""
    found: dict[tuple[str, Mixer], list[int]] = {}
    for i, layer in enumerate(stack.layers):
        for name, mixer in layer.mixers():
            found.setdefault((name, mixer), []).append(i)
    return [(name, mixer, layers) for (name, mixer), layers in found.items()]


def _where(layers: list[int], stack: Stack) -> str:
    return "" if len(layers) == len(stack.layers) else f" ({places(layers, len(stack.layers))})"


def _attention(subject: Subject) -> Iterator[str]:
    for prefix, stack in _each(subject.model):
        seen: dict[str, list[int]] = {}
        for _, mixer, layers in by_layer(stack):
            if mixer.role != "feed_forward":
                seen.setdefault(attention_words(mixer), []).extend(layers)
        for words, layers in seen.items():
            yield f"{prefix}{words}{_where(sorted(layers), stack)}"


def _positions(subject: Subject) -> Iterator[str]:
    for prefix, stack in _each(subject.model):
        added = added_words(stack.input)
        if added is not None:
            yield f"{prefix}{added}"
        seen: dict[str, list[int]] = {}
        for _, mixer, layers in by_layer(stack):
            if isinstance(mixer, Attention | LatentAttention):
                dim = mixer.rotary_dim if isinstance(mixer, LatentAttention) else mixer.head_dim
                words = position_words(mixer.position, dim) if mixer.position else "no positions"
                seen.setdefault(words, []).extend(layers)
        if added is not None:
            seen.pop("no positions", None)
        for words, layers in seen.items():
            yield f"{prefix}{words}{_where(sorted(layers), stack)}"
    for line in subject.verdict.lines():
        yield f"Context: {line}"


def _block(subject: Subject) -> Iterator[str]:
    for prefix, stack in _each(subject.model):
        seen: dict[str, list[int]] = {}
        for i, layer in enumerate(stack.layers):
            seen.setdefault(layer_words(layer), []).append(i)
        for words, layers in seen.items():
            yield f"{prefix}{words}{_where(layers, stack)}"
        if stack.norm is not None:
            yield f"{prefix}after the last layer: {norm_words(stack.norm)}"
        seen = {}
        for _, mixer, layers in by_layer(stack):
            if mixer.role == "feed_forward":
                seen.setdefault(feed_forward_words(mixer), []).extend(layers)
        for words, layers in seen.items():
            yield f"{prefix}{words}{_where(sorted(layers), stack)}"


def _visibility(subject: Subject) -> Iterator[str]:
    for prefix, stack in _each(subject.model):
        one = seer(stack, subject.model)
        seen: dict[str, list[int]] = {}
        for _, mixer, layers in by_layer(stack):
            if isinstance(mixer, Attention | LatentAttention):
                seen.setdefault(mask_words(mixer.mask, one), []).extend(layers)
            elif isinstance(mixer, CrossAttention):
                seen.setdefault("every token reads every row that the encoder gives", []).extend(layers)
        for words, layers in seen.items():
            yield f"{prefix}{words}{_where(sorted(layers), stack)}"
    joins = [tower.join for tower in subject.model.towers if isinstance(tower.join, Replace)]
    if joins:
        both = any(join.both_ways for join in joins)
        seen_by = "one another both ways" if both else "what is before them, as text does"
        yield f"the rows of one image see {seen_by}"


def seer(stack: Stack, model: Model) -> str:
    """What the rows of a stack are called; of those that stand for images nothing is said."""
    if not isinstance(stack.input, Tokens):
        return "row"
    return "text token" if any(isinstance(tower.join, Replace) for tower in model.towers) else "token"


def _head(subject: Subject) -> Iterator[str]:
    return head_lines(subject.model)


def head_lines(model: Model) -> Iterator[str]:
    """What the model answers."""
    head = model.head
    match head:
        case MaskedLanguage():
            yield f"the masked tokens themselves, {_matrix(head, model)}"
        case Language():
            yield f"next token, {_matrix(head, model)}"
            if head.cap:
                yield f"logits capped at {head.cap:g}"
            if head.scale != 1:
                root = abs(head.scale - model.trunk.width**-0.5) < 1e-9
                yield f"logits times {number(head.scale)}" + (
                    ", 1 over the root of the width" if root else ""
                )
        case MultiToken():
            yield f"next token and {len(head.layers)} more, {_matrix(head.next, model)}"
        case SequenceClass():
            yield f"one of {head.classes} classes for the whole sequence"
        case TokenClass():
            yield f"one of {head.classes} classes for each token"
        case Span():
            yield "a start and an end: extractive question answering"
        case PooledEmbedding() | Pool():
            yield "one vector for the sequence"
        case None:
            yield "none: hidden states"


def is_tied(head: Language, model: Model) -> bool:
    """Whether the output matrix is a token table."""
    tables = {model.trunk.input.shared, *(s.input.shared for s in (model.encoder, model.decoder) if s)}
    return head.shared in tables - {None}


def _matrix(head: Language, model: Model) -> str:
    return "output matrix shared with the input table" if is_tied(head, model) else "own output matrix"


def _serving(subject: Subject) -> Iterator[str]:
    model, context = subject.model, subject.context
    if model.decoder is None:
        yield "no cache: the whole input is read at once"
        return
    yield from _cache(model, context)
    if model.encoder is not None:
        rows = model.cache_bytes(0, source=2) // max(model.encoder.input.rows(2), 1)
        line = f"{rows:,} bytes more for each row the encoder gives, kept for the whole answer"
        most = getattr(model.encoder.input.position, "rows", None)
        yield line + (f": {bytes_words(rows * most)} for {most:,}" if most else "")
    kv_heads = [m.kv_heads for m in model.decoder.mixers() if isinstance(m, Attention)]
    if kv_heads and min(kv_heads) == 1:
        yield "splitting over devices copies the one key/value head to each"
    elif kv_heads:
        yield f"splits over up to {min(kv_heads)} devices without copying keys and values"
    elif any(isinstance(m, LatentAttention) for m in model.decoder.mixers()):
        yield "the latent is one for all heads: every device that holds heads keeps all of it"


def _cache(model: Model, context: int | None) -> Iterator[str]:
    """What a token costs, and where windows are full what a further one does."""
    first = model.cache_bytes(1) - model.cache_bytes(0)
    fixed = model.cache_bytes(0)
    if fixed:
        yield f"{bytes_words(fixed)} of state at any length"
    if context is None:
        yield f"{first:,} bytes of cache for the first token in 16 bits"
        return
    full, last = model.cache_bytes(context), model.cache_bytes(context) - model.cache_bytes(context - 1)
    at = f"{bytes_words(full)} at {context:,} tokens"
    if first == last:
        yield f"{first:,} bytes of cache a token in 16 bits: {at}"
    else:
        yield f"{first:,} bytes of cache a token in 16 bits, {last:,} once the windows are full: {at}"
