"""The order in which to read a model: eight steps, in plain words, with figures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from qkv.inspection.places import places
from qkv.inspection.verdict import Verdict
from qkv.spec import (
    Alibi,
    Attention,
    Buckets,
    CrossAttention,
    Dense,
    Disentangled,
    DynamicNTK,
    Experts,
    Frames,
    Gated,
    GatedDelta,
    Interpolation,
    LatentAttention,
    Layer,
    LayerNorm,
    Learned,
    Llama3,
    LongRope,
    Mask,
    Model,
    Norm,
    Patches,
    Position,
    RelativeSinusoidal,
    RMSNorm,
    Rotary,
    Shaw,
    Sinusoidal,
    Stack,
    Tokens,
    Yarn,
)
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
from qkv.spec.layers import Mixer, arrangement
from qkv.spec.masks import And, Causal, Chunk, Everything, Window
from qkv.spec.text import show

GIB = 1 << 30


@dataclass(frozen=True)
class Step:
    """One of the eight: its number, its name, and what it says, a line each."""

    number: int
    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Subject:
    """What the steps read. `tokenizer` is a line about the tokenizer's own files, where there are any."""

    model: Model
    verdict: Verdict
    context: int | None
    tokenizer: str | None = None


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
    return [*found, *(("tower", tower.stack) for tower in model.towers)]


def _each(model: Model) -> Iterator[tuple[str, Stack]]:
    """Stacks with a prefix for a line."""
    for name, stack in stacks(model):
        yield (f"{name}: " if name else ""), stack


def _tokens(subject: Subject) -> Iterator[str]:
    for prefix, stack in _each(subject.model):
        match stack.input:
            case Tokens() as tokens:
                vector = tokens.table_width or tokens.width
                yield f"{prefix}{tokens.vocab:,} entries, each a vector of {vector:,}"
                if tokens.scale != 1:
                    yield f"{prefix}embeddings times {tokens.scale:.4g}"
                if tokens.types:
                    yield f"{prefix}{tokens.types} token types"
            case Patches() as patches:
                rows = patches.rows(0)
                height, width = patches.image
                yield f"{prefix}images of {height} x {width} in patches of {patches.size}: {rows:,} rows"
            case Frames() as frames:
                every = math.prod(frames.strides)
                yield f"{prefix}audio of {frames.channels} bins, one row every {every} frames"
    if subject.tokenizer:
        yield subject.tokenizer


def _size(subject: Subject) -> Iterator[str]:
    for prefix, stack in _each(subject.model):
        yield f"{prefix}{len(stack.layers)} layers, width {stack.width:,}"
    total, active = subject.model.parameters(), subject.model.parameters(active=True)
    if active != total:
        yield f"{total:,} parameters, {active:,} of them used by a token (input table included)"
    yield "parameters: " + ", ".join(f"{share / total:.1%} {name}" for name, share in parts(subject.model))


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


def attention_words(mixer: Mixer) -> str:
    """What a mixer over positions is, in words."""
    match mixer:
        case LatentAttention():
            rank = f"queries through {mixer.query_rank:,}, " if mixer.query_rank else ""
            return (
                f"{mixer.heads} heads over one latent of {mixer.rank} + {mixer.rotary_dim} rotated dimensions"
                f" (MLA); {rank}head size {mixer.head_dim} + {mixer.rotary_dim}, values {mixer.value_dim}"
            )
        case Attention() | CrossAttention():
            return _heads(mixer) + _extras(mixer)
        case GatedDelta():
            state = f"{mixer.key_dim} x {mixer.value_dim}"
            return f"gated delta rule: {mixer.value_heads} heads, each a state of {state} at any length"
        case _:
            return show(mixer)


def _heads(mixer: Attention | CrossAttention) -> str:
    group = mixer.heads // mixer.kv_heads
    kind = "cross-attention: " if mixer.role == "cross" else ""
    if group == 1:
        shared = f"{mixer.heads} heads, each with its own keys and values (MHA)"
    elif mixer.kv_heads == 1:
        shared = f"{mixer.heads} query heads share one key/value head (MQA)"
    else:
        shared = f"{mixer.heads} query heads share {mixer.kv_heads} key/value heads (GQA {group}:1)"
    return f"{kind}{shared}, head size {mixer.head_dim}"


def _extras(mixer: Attention | CrossAttention) -> str:
    through, score, found = mixer.projections, mixer.score, []
    if through.norm is not None:
        when = "after" if through.norm_after_rotation else "before"
        over = {"head": "each head", "heads": "each head, a scale of its own", "all": "all heads at once"}
        rotated = f", {when} rotating" if isinstance(mixer.position, Rotary) else ""
        found.append(f"queries and keys normalised over {over[through.norm_over]}{rotated}")
    if through.bias:
        letters = {"q": "queries", "k": "keys", "v": "values", "o": "output"}
        found.append("bias on " + ", ".join(letters[c] for c in through.bias))
    if through.gate:
        found.append(f"output gated by {through.gate}")
    if through.clip:
        found.append(f"clipped to {through.clip:g}")
    if score.cap:
        found.append(f"scores capped at {score.cap:g}")
    if score.sink:
        found.append("a learned sink in every head")
    if score.query_scale:
        found.append("queries scaled by position")
    if score.scale is not None and abs(score.scale - mixer.head_dim**-0.5) > 1e-9:
        found.append(f"scores times {score.scale:.4g}")
    return "".join(f"; {words}" for words in found)


def _positions(subject: Subject) -> Iterator[str]:
    for prefix, stack in _each(subject.model):
        added = getattr(stack.input, "position", None)
        if added is not None:
            yield f"{prefix}{position_words(added)}"
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


def position_words(position: Position, head_dim: int = 0) -> str:
    """A position scheme in words; for a scaled rotary, what becomes of its pairs."""
    match position:
        case Learned():
            rows = position.rows - position.offset
            return f"a learned vector for each of {rows:,} positions, added to the embedding"
        case Sinusoidal():
            return "sinusoids added to the embedding"
        case Rotary():
            return _rotary_words(position, head_dim)
        case Alibi():
            return "ALiBi: a penalty on distance, one slope a head"
        case Buckets():
            return f"a learned bias for each of {position.buckets} buckets of distance (T5)"
        case Shaw():
            return f"learned vectors for distances up to {position.clip} (Shaw)"
        case RelativeSinusoidal():
            return "sinusoids of the distance, with a key of their own (Transformer-XL)"
        case Disentangled():
            return "contents and distances scored apart (DeBERTa)"
        case _:
            return show(position)


def _rotary_words(position: Rotary, head_dim: int) -> str:
    dims = position.dims or head_dim
    partial = f" on {dims} of {head_dim} dimensions" if dims != head_dim else ""
    names = {
        Yarn: "YaRN",
        Llama3: "Llama-3 scaling",
        LongRope: "LongRoPE",
        DynamicNTK: "dynamic NTK",
        Interpolation: "position interpolation",
    }
    words = f"rotary{partial}, theta {position.theta:,.0f}"
    scaling = position.scaling
    if scaling is None:
        return words
    name, factor = names.get(type(scaling), type(scaling).__name__), getattr(scaling, "factor", None)
    words += f", {name}" + (f" x{factor:g}" if factor else "")
    if not isinstance(scaling, DynamicNTK | LongRope):
        words += "; " + pairs_words(position, head_dim)
    return words


def pairs_words(position: Rotary, head_dim: int) -> str:
    """How many rotary pairs a scaling keeps, slows fully, or puts in between."""
    plain = Rotary(position.theta, position.dims).frequencies(head_dim, 1)[0]
    scaled, _ = position.frequencies(head_dim, 1)
    ratio = scaled / plain
    slowest = float(ratio.min())
    kept = int((ratio > 1 - 1e-6).sum())
    slowed = int((ratio < slowest + 1e-6).sum()) if slowest < 1 - 1e-6 else 0
    between = len(ratio) - kept - slowed
    middle = f", {between} in between" if between else ""
    return f"{kept} of {len(ratio)} pairs unchanged, {slowed} slowed {1 / slowest:.3g}-fold{middle}"


ARRANGEMENTS = {
    "pre_norm": "pre-norm, a norm before each branch",
    "post_norm": "post-norm, a norm after each sum",
    "sandwich": "sandwich, a norm before and after each branch",
    "reordered": "a norm after each branch, before the sum",
    "parallel": "attention and feed-forward side by side",
}


def _block(subject: Subject) -> Iterator[str]:
    for prefix, stack in _each(subject.model):
        seen: dict[str, list[int]] = {}
        for i, layer in enumerate(stack.layers):
            seen.setdefault(_layer_words(layer), []).append(i)
        for words, layers in seen.items():
            yield f"{prefix}{words}{_where(layers, stack)}"
        if stack.norm is not None:
            yield f"{prefix}{norm_words(stack.norm)} at the end"
        seen = {}
        for _, mixer, layers in by_layer(stack):
            if mixer.role == "feed_forward":
                seen.setdefault(feed_forward_words(mixer), []).extend(layers)
        for words, layers in seen.items():
            yield f"{prefix}{words}{_where(sorted(layers), stack)}"


def _layer_words(layer: Layer) -> str:
    name, given = arrangement(layer) or ("", {})
    words = ARRANGEMENTS.get(name, "steps of its own")
    if name == "parallel":
        words += ", a norm each" if given.get("norms", 1) != 1 else ", one norm for both"
    steps = layer.sublayers
    norms = [n for s in steps for n in (s.before, s.after, s.post, *(b.norm for b in s.branches)) if n]
    kinds = ", ".join(dict.fromkeys(norm_words(norm) for norm in norms)) or "no norm"
    scales = dict.fromkeys(s.scale for s in steps if s.scale != 1)
    return f"{words}: {kinds}" + "".join(f"; each step times {scale:.4g}" for scale in scales)


def norm_words(norm: Norm) -> str:
    match norm:
        case RMSNorm():
            extra = " (1 + scale)" if norm.offset == 1 else ""
            return f"RMSNorm{extra}, eps {norm.eps:g}"
        case LayerNorm():
            return f"LayerNorm{'' if norm.bias else ' without bias'}, eps {norm.eps:g}"
        case _:
            return type(norm).__name__


def feed_forward_words(mixer: Mixer) -> str:
    """A feed-forward in words."""
    match mixer:
        case Dense():
            return f"{_act(mixer.activation)} feed-forward of {mixer.hidden:,}"
        case Gated():
            return f"gated {_act(mixer.activation)} feed-forward of {mixer.hidden:,}"
        case Experts():
            return _experts_words(mixer)
        case _:
            return show(mixer)


def _experts_words(mixer: Experts) -> str:
    router, shared = mixer.router, mixer.shared_expert
    groups = f" from the best {router.top_groups} of {router.groups} groups" if router.groups > 1 else ""
    beside = f", and a shared one of {shared.hidden:,}" if shared else ""
    chosen = f"{mixer.count} experts, {mixer.top_k} for each token{groups}{beside}"
    return f"{chosen}; {router.score} router; each expert a {feed_forward_words(mixer.expert)}"


def _act(activation: object) -> str:
    names = {"silu": "SiLU", "gelu": "GELU", "gelu_tanh": "GELU (tanh)", "relu": "ReLU", "relu2": "ReLU²"}
    return names.get(activation, activation) if isinstance(activation, str) else "clamped SiLU"


def _visibility(subject: Subject) -> Iterator[str]:
    for prefix, stack in _each(subject.model):
        seen: dict[str, list[int]] = {}
        for _, mixer, layers in by_layer(stack):
            if isinstance(mixer, Attention | LatentAttention):
                seen.setdefault(mask_words(mixer.mask), []).extend(layers)
            elif isinstance(mixer, CrossAttention):
                seen.setdefault("every token reads all of the source", []).extend(layers)
        for words, layers in seen.items():
            yield f"{prefix}{words}{_where(sorted(layers), stack)}"


def mask_words(mask: Mask) -> str:
    """What a token sees, in words."""
    match mask:
        case Causal():
            return "every token sees itself and all before it"
        case Everything():
            return "every token sees every token"
        case Window():
            return f"every token sees {mask.before - 1:,} before it and {mask.after:,} after it"
        case And(Causal(), Window(before, _)) | And(Window(before, _), Causal()):
            return f"every token sees itself and the {before - 1:,} before it"
        case And(Causal(), Chunk(size)) | And(Chunk(size), Causal()):
            return f"every token sees itself and what is before it in its own chunk of {size:,}"
        case _:
            return show(mask)


def _head(subject: Subject) -> Iterator[str]:
    head, model = subject.model.head, subject.model
    match head:
        case MaskedLanguage():
            yield f"the masked tokens themselves, {_matrix(head, model)}"
        case Language():
            yield f"next token, {_matrix(head, model)}"
            if head.cap:
                yield f"logits capped at {head.cap:g}"
            if head.scale != 1:
                yield f"logits times {head.scale:.4g}"
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


def _matrix(head: Language, model: Model) -> str:
    tables = {model.trunk.input.shared, *(s.input.shared for s in (model.encoder, model.decoder) if s)}
    return (
        "output matrix shared with the input table" if head.shared in tables - {None} else "own output matrix"
    )


def _serving(subject: Subject) -> Iterator[str]:
    model, context = subject.model, subject.context
    if model.decoder is None:
        yield "no cache: the whole input is read at once"
        return
    token = model.cache_bytes(1)
    full = model.cache_bytes(context) if context else 0
    if context and full == context * token:
        yield f"{token:,} bytes of cache a token in 16 bits: {full / GIB:.2f} GiB at {context:,}"
    elif context:
        yield f"{token:,} bytes of cache for the first token in 16 bits"
        yield f"{full / GIB:.2f} GiB at {context:,}: {full / context:,.0f} bytes a token on average"
    else:
        yield f"{token:,} bytes of cache for the first token in 16 bits"
    if model.encoder is not None:
        rows = model.cache_bytes(0, source=2) // max(model.encoder.input.rows(2), 1)
        yield f"{rows:,} bytes more for each row the encoder gives, kept for the whole answer"
    kv_heads = [m.kv_heads for m in model.decoder.mixers() if isinstance(m, Attention)]
    if kv_heads:
        yield f"splits over up to {min(kv_heads)} devices without copying keys and values"
    elif any(isinstance(m, LatentAttention) for m in model.decoder.mixers()):
        yield "the latent is one for all heads: every device that holds heads keeps all of it"
