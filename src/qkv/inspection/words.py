"""The parts of a description in plain words."""

from __future__ import annotations

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
    Gate,
    Gated,
    GatedDelta,
    Indexer,
    Interpolation,
    LatentAttention,
    Layer,
    LayerNorm,
    Learned,
    Llama3,
    LongRope,
    Mask,
    Norm,
    Patches,
    Position,
    Proportional,
    RelativeSinusoidal,
    RMSNorm,
    Rotary,
    Router,
    Score,
    Shaw,
    Sinusoidal,
    Tokens,
    Yarn,
)
from qkv.spec.attention import StateSpace
from qkv.spec.feed_forward import ClampedSwish
from qkv.spec.inputs import Input, Project
from qkv.spec.layers import Mixer, arrangement
from qkv.spec.masks import And, Causal, Chunk, Everything, Streaming, Window
from qkv.spec.text import show


def number(value: float) -> str:
    """A small number without needless digits: 1e-5, 0.0442."""
    return f"{value:.4g}".replace("e-0", "e-")


def bytes_words(count: float) -> str:
    """Memory in binary units, as devices count it."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:,.0f} bytes"


def share_words(part: float) -> str:
    """A share of a whole; what is there is never nothing."""
    return "under 0.1%" if 0 < part < 0.0005 else f"{part:.1%}"


def added_words(source: Input) -> str | None:
    """What tells positions apart before the first layer, or None."""
    position = source.position
    if isinstance(position, Learned) and isinstance(source, Frames):  # Whisper stores its sinusoids
        return f"a stored table of {position.rows:,} positions, added to the frames"
    return None if position is None else position_words(position)


def attention_words(mixer: Mixer) -> str:
    """What a mixer over positions is, in words."""
    match mixer:
        case LatentAttention():
            return _latent(mixer)
        case Attention() | CrossAttention():
            return _heads(mixer) + "".join(f"; {words}" for words in particulars(mixer))
        case GatedDelta():
            state = f"{mixer.key_dim} x {mixer.value_dim}"
            return f"gated delta rule: {mixer.value_heads} heads, each a state of {state} at any length"
        case StateSpace():
            state = f"{mixer.head_dim} x {mixer.state}"
            return f"state space (Mamba-2): {mixer.heads} heads, each a state of {state} at any length"
        case _:
            return show(mixer)


def _latent(mixer: LatentAttention) -> str:
    words = (
        f"{mixer.heads} heads over one latent of {mixer.rank} + {mixer.rotary_dim} rotated dimensions (MLA)"
    )
    through = "keys and values"
    if mixer.query_rank:
        words += f"; queries through a latent of {mixer.query_rank:,}"
        through = "queries, keys and values"
    words += f"; head size {mixer.head_dim} + {mixer.rotary_dim}, values {mixer.value_dim}"
    words += f"; {norm_words(mixer.norm)} on the latents of {through}"
    scale = scale_words(mixer.score, mixer.head_dim + mixer.rotary_dim)
    chosen = [] if mixer.indexer is None else [indexer_words(mixer.indexer)]
    return "; ".join([words, *scale, *chosen])


def indexer_words(indexer: Indexer) -> str:
    """What chooses the keys that a query sees."""
    if not indexer.own:
        return f"over the {indexer.top_k:,} keys that a layer before it chose"
    return (
        f"over {indexer.top_k:,} keys, chosen by an indexer of {indexer.heads} heads with one key of "
        f"{indexer.head_dim} dimensions a token"
    )


def _heads(mixer: Attention | CrossAttention) -> str:
    group = mixer.heads // mixer.kv_heads
    kind = "cross-attention: " if mixer.role == "cross" else ""
    if group == 1:
        shared = f"{mixer.heads} heads, each with its own keys and values (MHA)"
    elif mixer.kv_heads == 1:
        shared = f"{mixer.heads} query heads share one key/value head (MQA)"
    else:
        shared = f"{mixer.heads} query heads share {mixer.kv_heads} key/value heads (GQA {group}:1)"
    values = f", values {mixer.value_dim}" if mixer.value_dim not in (None, mixer.head_dim) else ""
    return f"{kind}{shared}, head size {mixer.head_dim}{values}"


def particulars(mixer: Attention | CrossAttention) -> list[str]:
    """What this attention has beside its heads."""
    through, score, found = mixer.projections, mixer.score, []
    if through.norm is not None:
        when = "after" if through.norm_after_rotation else "before"
        over = {"head": "each head", "heads": "each head, a scale of its own", "all": "all heads at once"}
        rotated = f", {when} rotating" if isinstance(mixer.position, Rotary) else ""
        kind = norm_words(through.norm)
        found.append(f"{kind} on queries and keys over {over[through.norm_over]}{rotated}")
    if through.values_are_keys:
        found.append("values made by the keys' projection")
    if through.value_norm is not None:
        found.append(f"{norm_words(through.value_norm)} on values")
    if through.value_scale != 1:
        found.append(f"values times {number(through.value_scale)}")
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
    return found + scale_words(score, mixer.head_dim)


def scale_words(score: Score, head_dim: int) -> list[str]:
    """What scores are multiplied by, where it is not the usual 1 / sqrt(head size)."""
    if score.scale is None or abs(score.scale - head_dim**-0.5) < 1e-9:
        return []
    return ["scores not scaled" if score.scale == 1 else f"scores times {number(score.scale)}"]


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
            shared = "; one table for all these layers" if position.shared else ""
            sides = "to either side" if position.bidirectional else "into the past"
            buckets = f"each of {position.buckets} buckets of distance {sides}"
            return f"a learned bias a head for {buckets} (T5){shared}"
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
    if position.axes is not None:
        sections = " + ".join(map(str, position.axes.sections))
        order = ", interleaved" if position.axes.order == "interleaved" else ""
        words += f", {sections} pairs for {len(position.axes.sections)} axes{order}"
    scaling = position.scaling
    if scaling is None:
        return words
    if isinstance(scaling, Proportional):
        turning = int(scaling.share * dims // 2)
        slowed = f", slowed by a factor of {scaling.factor:g}" if scaling.factor != 1 else ""
        return f"{words}; {turning} of {dims // 2} pairs turn, the others stand still{slowed}"
    name, factor = names.get(type(scaling), type(scaling).__name__), getattr(scaling, "factor", None)
    words += f", {name}" + (f" x{factor:g}" if factor else "")
    if not isinstance(scaling, DynamicNTK | LongRope):
        words += "; " + pairs_words(position, head_dim)
    _, warmth = position.frequencies(head_dim, 1)
    return words if warmth == 1 else f"{words}; cosines and sines times {number(warmth)}"


def pairs_words(position: Rotary, head_dim: int) -> str:
    """How many rotary pairs a scaling keeps, slows fully, or puts in between."""
    plain = Rotary(position.theta, position.dims).frequencies(head_dim, 1)[0]
    scaled, _ = position.frequencies(head_dim, 1)
    ratio = scaled / plain
    slowest = float(ratio.min())
    kept = int((ratio > 1 - 1e-6).sum())
    slowed = int((ratio < slowest + 1e-6).sum()) if slowest < 1 - 1e-6 else 0
    if slowed == len(ratio):
        return f"all {slowed} pairs slowed by a factor of {1 / slowest:.3g}"
    between = len(ratio) - kept - slowed
    middle = f", {between} in between" if between else ""
    return f"{kept} of {len(ratio)} pairs unchanged, {slowed} slowed by a factor of {1 / slowest:.3g}{middle}"


ARRANGEMENTS = {
    "pre_norm": "pre-norm, a norm before each branch",
    "post_norm": "post-norm, a norm after each sum",
    "sandwich": "sandwich, a norm before and after each branch",
    "reordered": "a norm after each branch, before the sum",
    "parallel": "attention and feed-forward side by side",
}


def layer_words(layer: Layer) -> str:
    """How a layer's steps and norms are arranged."""
    name, given = arrangement(layer) or ("", {})
    words = ARRANGEMENTS.get(name, "steps of its own")
    if all(step.before and step.before == step.after for step in layer.sublayers):
        words = ARRANGEMENTS["sandwich"]
    if len(layer.sublayers) == 1 and len(layer.sublayers[0].branches) == 1 and name == "pre_norm":
        words = "one branch a layer, a norm before it"
    if name == "parallel":
        words += ", a norm each" if given.get("norms", 1) != 1 else ", one norm for both"
    steps = layer.sublayers
    branches = [branch for step in steps for branch in step.branches]
    norms = [n for s in steps for n in (s.before, s.after, s.post) if n and not isinstance(n, Gate)]
    norms += [norm for branch in branches for norm in (branch.norm, branch.after) if norm]
    kinds = ", ".join(dict.fromkeys(norm_words(norm) for norm in norms)) or "no norm"
    scales = dict.fromkeys(s.scale for s in steps if s.scale != 1)
    last = "; then the stream times one learned factor" if isinstance(steps[-1].post, Gate) else ""
    return f"{words}: {kinds}" + "".join(f"; each step times {number(scale)}" for scale in scales) + last


def norm_words(norm: Norm) -> str:
    match norm:
        case RMSNorm():
            extra = " (1 + scale)" if norm.offset == 1 else "" if norm.scale else " without scale"
            return f"RMSNorm{extra}, eps {number(norm.eps)}"
        case LayerNorm():
            return f"LayerNorm{'' if norm.bias else ' without bias'}, eps {number(norm.eps)}"
        case _:
            return type(norm).__name__


def feed_forward_words(mixer: Mixer) -> str:
    """A feed-forward in words; a bias is named where it is not the usual: none with a gate, else one."""
    match mixer:
        case Dense():
            bias = "" if mixer.bias else " without bias"
            return f"{_act(mixer.activation)} feed-forward of {mixer.hidden:,}{bias}"
        case Gated():
            bias = " with biases" if mixer.bias else ""
            return f"gated {_act(mixer.activation)} feed-forward of {mixer.hidden:,}{bias}"
        case Experts():
            return _experts_words(mixer)
        case _:
            return show(mixer)


def _experts_words(mixer: Experts) -> str:
    router, shared = mixer.router, mixer.shared_expert
    groups = f" from the best {router.top_groups} of {router.groups} groups" if router.groups > 1 else ""
    beside = f", and a shared one of {shared.hidden:,}" if shared else ""
    chosen = f"{mixer.count} experts, {mixer.top_k} for each token{groups}{beside}"
    within = f" between maps to {mixer.latent:,} dimensions and back" if mixer.latent is not None else ""
    return f"{chosen}; {_router_words(router)}; each expert a {feed_forward_words(mixer.expert)}{within}"


def _router_words(router: Router) -> str:
    words = f"{router.score} router"
    words += " with a bias" if router.bias else ""
    words += " over a norm of its own" if router.norm is not None else ""
    words += ", a bias of its own for choosing alone" if router.balance else ""
    words += ", chosen weights made to sum to 1" if router.normalise else ""
    if router.scale != 1:
        words += f", {'then ' if router.normalise else ''}times {number(router.scale)}"
    words += ", times a learned factor of each expert" if router.gain else ""
    words += ", on the experts' inputs" if router.scales == "input" else ""
    words += ", experts choosing their tokens" if router.chosen_by == "experts" else ""
    full = router.capacity is not None
    return words + (f", no expert taking over {router.capacity:g} times its even share" if full else "")


def _act(activation: str | ClampedSwish) -> str:
    if isinstance(activation, ClampedSwish):
        gate = f"x sigmoid({activation.alpha:g} x), limit {activation.limit:g}"
        return f"clamped swish ({gate}, up + {activation.offset:g})"
    return ACTIVATIONS.get(activation, activation)


ACTIVATIONS = {
    "silu": "SiLU",
    "gelu": "GELU",
    "gelu_tanh": "GELU (tanh)",
    "quick_gelu": "quick GELU",
    "relu": "ReLU",
    "relu2": "ReLU²",
}


def mask_words(mask: Mask, one: str = "token") -> str:
    """What a token (or whatever a row of this stack is) sees, in words."""
    match mask:
        case Causal():
            return f"every {one} sees itself and all before it"
        case Everything():
            return f"every {one} sees every {one}"
        case Window():
            return f"every {one} sees itself, {mask.before - 1:,} before it and {mask.after:,} after it"
        case And(Causal(), Window(before, _)) | And(Window(before, _), Causal()):
            return f"every {one} sees itself and the {before - 1:,} before it"
        case And(Causal(), Streaming(first, window)) | And(Streaming(first, window), Causal()):
            return f"every {one} sees itself, the {window - 1:,} before it and the first {first:,}"
        case And(Causal(), Chunk(size)) | And(Chunk(size), Causal()):
            return f"every {one} sees itself and what is before it in its own chunk of {size:,}"
        case _:
            return show(mask)


def convolution_words(frames: Frames) -> str:
    """Whisper's stem: how many convolutions, how wide, and what each step skips."""
    strides = " and ".join(map(str, frames.strides))
    activation = f"{_act(frames.activation)} after each"
    return f"{len(frames.strides)} convolutions of {frames.kernel} frames, strides {strides}, {activation}"


def project_words(project: Project) -> str:
    """An affine map, and what follows it."""
    words = f"projected to {project.width:,}"
    words += f", {_act(project.activation)}" if project.activation else ""
    return words + (f", {norm_words(project.norm)}" if project.norm is not None else "")


def scale_of_embedding(tokens: Tokens) -> str:
    root = abs(tokens.scale - tokens.width**0.5) < 1e-6
    return f"embeddings times {number(tokens.scale)}" + (", the root of the width" if root else "")


def tower_name(source: Input) -> str:
    """What a tower is called."""
    return {Patches: "image tower", Frames: "audio tower"}.get(type(source), "tower")
