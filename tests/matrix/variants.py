"""Every variant the invariants are held over. A new one joins in one line."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from qkv.spec import (
    NTK,
    Alibi,
    Attention,
    Axes,
    Branch,
    Buckets,
    Causal,
    Chunk,
    ClampedSwish,
    CrossAttention,
    Dense,
    Dilated,
    Disentangled,
    DynamicNTK,
    DyT,
    Everything,
    Experts,
    Gate,
    Gated,
    GatedDelta,
    Global,
    HeadBiases,
    Interpolation,
    Language,
    LatentAttention,
    Layer,
    LayerNorm,
    Learned,
    Llama3,
    LogScale,
    LongRope,
    Mask,
    MaskedLanguage,
    Model,
    MultiToken,
    Norm,
    Position,
    Project,
    Projections,
    RelativeSinusoidal,
    RelativeTable,
    RMSNorm,
    Rotary,
    Router,
    ScaleNorm,
    Score,
    Shaw,
    Sinusoidal,
    Span,
    Stack,
    StateSpace,
    Streaming,
    Strided,
    Sublayer,
    TokenClass,
    Tokens,
    Window,
    Yarn,
    parallel,
    post_norm,
    pre_norm,
    reordered,
    sandwich,
    step,
)
from qkv.spec.heads import Head

VOCAB, WIDTH = 50, 16
Term = Literal["content_to_position", "position_to_content"]
ROTARY = Rotary(100.0)
NORM_LAST = Projections(norm=RMSNorm(), norm_after_rotation=True)


def attention(heads: int = 4, kv_heads: int = 2, head_dim: int = 6, **parts: object) -> Attention:
    return Attention(heads, kv_heads, head_dim, **{"position": ROTARY, **parts})  # type: ignore[arg-type]


def model(
    *layers: Layer, position: Position | None = None, norm: Norm | None = RMSNorm(), tied: bool = False
) -> Model:
    shared = "tokens" if tied else None
    tokens = Tokens(VOCAB, WIDTH, position=position, shared=shared)
    return Model(decoder=Stack(tokens, layers, norm), head=Language(VOCAB, shared=shared))


def of(first: Attention, second: Attention | None = None) -> Model:
    """Two pre-norm layers with these attentions."""
    feed_forward = Gated("silu", 24)
    return model(*(pre_norm(a, feed_forward, norm=RMSNorm()) for a in (first, second or first)))


def of_layer(layer: Layer) -> Model:
    return model(layer, layer)


def gated(gate: Gate, **slots: object) -> Layer:
    """A layer whose steps' outputs pass a gate."""
    steps = (step(mixer, before=RMSNorm(), gate=gate, **slots) for mixer in (attention(), Gated("silu", 20)))
    return Layer(tuple(steps))


EVERY_TERM: tuple[Term, ...] = ("content_to_position", "position_to_content")


def disentangled(
    terms: tuple[Term, ...] = EVERY_TERM, buckets: int | None = None, own: bool = False, norm: bool = False
) -> Disentangled:
    """Distances up to 5 by themselves, or up to 12 in buckets: beyond both some sequences go."""
    furthest = 12 if buckets else 5
    table = RelativeTable(2 * (buckets or furthest), LayerNorm() if norm else None, shared="distances")
    return Disentangled(table, terms, furthest, buckets, own)


BIASES: dict[str, Position] = {
    "alibi": Alibi(),
    "alibi-steeper": Alibi(max_bias=4.0),
    "shaw": Shaw(3),
    "shaw-keys-only": Shaw(3, values=False),
    "shaw-per-head": Shaw(3, per_head=True),
    "transformer-xl": RelativeSinusoidal(),
    "disentangled": disentangled(),
    "disentangled-own": disentangled(own=True),
    "disentangled-content-to-position": disentangled(terms=EVERY_TERM[:1]),
    "disentangled-position-to-content-own": disentangled(terms=EVERY_TERM[1:], own=True),
    "disentangled-buckets-normed": disentangled(buckets=8, norm=True),
    "rotary-sections": Rotary(100.0, axes=Axes((1, 2))),
    "rotary-sections-own": Rotary(100.0, axes=Axes((2, 1), own=True)),
    "rotary-sections-interleaved": Rotary(100.0, axes=Axes((1, 1, 1), "interleaved")),
}
POSITIONS = {name: of(attention(position=position)) for name, position in BIASES.items()} | {
    "alibi-six-heads": of(attention(6, 2, position=Alibi())),
    "alibi-window": of(attention(position=Alibi(), mask=Causal() & Window(4))),
    "buckets": of(attention(position=Buckets(8, 10, False, shared="distances"))),
    "buckets-each": of(attention(position=Buckets(8, 10, False))),
    "buckets-window": of(attention(position=Buckets(8, 10, False), mask=Causal() & Window(4))),
    "shaw-window": of(attention(position=Shaw(2), mask=Causal() & Window(4))),
    "transformer-xl-one-bias": of(attention(position=RelativeSinusoidal(biases=HeadBiases(shared="biases")))),
    "transformer-xl-window": of(attention(position=RelativeSinusoidal(), mask=Causal() & Window(4))),
    "disentangled-window": of(attention(position=disentangled(), mask=Causal() & Window(4))),
}

VARIANTS: dict[str, Model] = {
    # heads
    "multi-head": of(attention(4, 4)),
    "grouped": of(attention(4, 2)),
    "multi-query": of(attention(3, 1)),
    "value-dim": of(attention(value_dim=10)),
    # positions
    "none": of(attention(position=None)),
    "learned": model(pre_norm(attention(position=None), Dense("gelu", 20)), position=Learned(40)),
    "learned-offset": model(pre_norm(attention(position=None), Dense("relu", 20)), position=Learned(42, 2)),
    "sinusoidal": model(pre_norm(attention(position=None), Dense("relu", 20)), position=Sinusoidal()),
    "interleaved": of(attention(position=Rotary(100.0, pairs="interleaved"))),
    "partial": of(attention(position=Rotary(100.0, dims=4))),
    "interpolation": of(attention(position=Rotary(100.0, scaling=Interpolation(4.0)))),
    "ntk": of(attention(position=Rotary(100.0, scaling=NTK(4.0)))),
    "dynamic-ntk": of(attention(position=Rotary(100.0, scaling=DynamicNTK(2.0, 32)))),
    "yarn": of(attention(position=Rotary(100.0, scaling=Yarn(4.0, 32)))),
    "yarn-paper": of(attention(position=Rotary(100.0, scaling=Yarn(4.0, 32, ramp="paper")))),
    "llama3": of(attention(position=Rotary(100.0, scaling=Llama3(8.0, 1.0, 4.0, 32)))),
    "longrope": of(attention(position=Rotary(100.0, scaling=LongRope((1, 1, 2), (1, 2, 4), 32, 2.0)))),
    "dynamic-ntk-beyond": of(attention(position=Rotary(100.0, scaling=DynamicNTK(2.0, 8)))),
    "longrope-beyond": of(attention(position=Rotary(100.0, scaling=LongRope((1, 1, 2), (1, 2, 4), 8, 2.0)))),
    # positions that bias the score
    **POSITIONS,
    # masks
    "window": of(attention(mask=Causal() & Window(3))),
    "streaming": of(attention(mask=Causal() & Streaming(2, 3))),
    "streaming-then-full": of(attention(mask=Streaming(1, 3) & Causal()), attention()),
    "streaming-alibi": of(attention(position=Alibi(), mask=Causal() & Streaming(2, 3))),
    "streaming-buckets": of(attention(position=Buckets(8, 10, False), mask=Causal() & Streaming(2, 3))),
    "streaming-shaw": of(attention(position=Shaw(2), mask=Causal() & Streaming(2, 3))),
    "streaming-transformer-xl": of(attention(position=RelativeSinusoidal(), mask=Causal() & Streaming(2, 3))),
    "streaming-none": of(attention(position=None, mask=Causal() & Streaming(2, 3))),
    "streaming-yarn": of(
        attention(
            position=Rotary(dims=4, scaling=Yarn(4.0, 8), pairs="interleaved"),
            mask=Causal() & Streaming(2, 3),
        )
    ),
    "window-then-full": of(attention(mask=Causal() & Window(3)), attention()),
    "chunk": of(attention(mask=Causal() & Chunk(4))),
    "strided": of(attention(mask=Causal() & (Strided(3) | Window(2)))),
    "dilated": of(attention(mask=Dilated(3, 2))),
    "global": of(attention(mask=Causal() & (Window(2) | Global((0,))))),
    # scores and projections
    "scale": of(attention(score=Score(0.3))),
    "cap": of(attention(score=Score(cap=2.0))),
    "sink": of(attention(score=Score(sink=True))),
    "biased": of(attention(projections=Projections(bias="qkvo"))),
    "clipped": of(attention(projections=Projections(clip=0.5))),
    "qk-norm": of(attention(projections=Projections(norm=RMSNorm()))),
    "qk-norm-by-head": of(attention(projections=Projections(norm=LayerNorm(bias=False), norm_over="heads"))),
    "qk-norm-over-all": of(attention(projections=Projections(norm=RMSNorm(), norm_over="all"))),
    "qk-norm-after-rotation": of(
        attention(projections=Projections(norm=RMSNorm(), norm_after_rotation=True))
    ),
    "qk-norm-after-dynamic": of(
        attention(
            position=Rotary(100.0, scaling=DynamicNTK(2.0, 8)),
            projections=Projections(norm=RMSNorm(), norm_after_rotation=True),
        )
    ),
    "gated-heads": of(attention(projections=Projections(gate="sigmoid"))),
    "query-scale": of(attention(position=None, score=Score(query_scale=LogScale(3, 0.2)))),
    # arrangements
    "post-norm": of_layer(post_norm(attention(), Dense("relu", 20))),
    "deep-norm": of_layer(post_norm(attention(), Dense("relu", 20), skip=1.7)),
    "sandwich": of_layer(sandwich(attention(), Gated("gelu_tanh", 20), norm=RMSNorm(offset=1))),
    "reordered": of_layer(reordered(attention(), Gated("silu", 20), norm=RMSNorm())),
    "parallel": of_layer(parallel(attention(), Dense("gelu", 20))),
    "parallel-two-norms": of_layer(parallel(attention(), Dense("gelu", 20), norms=2)),
    "scaled-step": of_layer(pre_norm(attention(), Gated("silu", 20), scale=0.4)),
    "attention-only": of_layer(pre_norm(attention())),
    "tied": model(pre_norm(attention(), Gated("silu", 20)), tied=True),
}

# one latent in place of keys and values; states in place of a cache that grows; gates on steps
LATENT = LatentAttention(3, 6, 4, 5, 8, 7, position=Rotary(100.0, pairs="interleaved"))
DELTA = GatedDelta(2, 4, 5, 3)
SPACE = StateSpace(4, 3, 5, groups=2)

VARIANTS |= {
    "latent": of(LATENT),
    "latent-absorbed": of(LATENT),  # by name: which form runs is no part of a description
    "latent-direct": of(replace(LATENT, query_rank=None)),
    "latent-direct-absorbed": of(replace(LATENT, query_rank=None, bias="ao")),
    "latent-window": of(replace(LATENT, mask=Causal() & Window(3), score=Score(0.4))),
    "latent-dynamic-absorbed": of(replace(LATENT, position=Rotary(100.0, scaling=DynamicNTK(2.0, 8)))),
    "latent-without-positions": of(replace(LATENT, position=None)),
    "gated-delta": of(DELTA),
    "gated-delta-one-step-convolution": of(replace(DELTA, convolution=1)),
    "state-space": of(SPACE),
    "state-space-one-group": of(replace(SPACE, groups=1, convolution_bias=False, convolution=3)),
    "delta-then-attention": of(DELTA, attention(projections=Projections(gate="sigmoid"))),
    "attention-then-state-space": of(attention(mask=Causal() & Window(3)), SPACE),
    "mixers-alone": model(*(pre_norm(mixer) for mixer in (SPACE, attention(position=None), DELTA))),
    "attention-beside-state-space": of_layer(parallel(attention(), SPACE, Gated("silu", 20))),
    "gated-step": of_layer(gated(Gate(activation="tanh"))),
    "layer-scale": of_layer(gated(Gate("channel"), scale=0.7)),
    "gate-in-sandwich": of_layer(
        gated(Gate("channel", "sigmoid"), after=RMSNorm(), post=LayerNorm(), skip=1.3)
    ),
}

# norms, activations, experts
ROUTED = Gated("silu", 12)


def of_norm(norm: Norm) -> Model:
    return model(*(pre_norm(attention(), Gated("silu", 20), norm=norm),) * 2, norm=norm)


def of_experts(router: Router, mixer: Attention | None = None, **parts: object) -> Model:
    """Two layers of eight experts, of which a token uses two.

    Learned positions: a token repeated at the start of a row would else be equal to itself up to
    rounding, and where experts choose, rounding would decide between the two.
    """
    experts = Experts(8, 2, **{"expert": ROUTED, "router": router, **parts})  # type: ignore[arg-type]
    layer = pre_norm(mixer or attention(), experts, norm=RMSNorm())
    return model(layer, layer, position=Learned(40))


VARIANTS |= {
    "scale-norm": of_norm(ScaleNorm()),
    # after the mixers: before them, random factors near 0 would make all keys nearly equal
    "dyt": of_layer(reordered(attention(), Gated("silu", 20), norm=DyT())),
    "rms-norm-offset": of_norm(RMSNorm(offset=1.0)),
    "rms-norm-without-scale": of_norm(RMSNorm(scale=False)),
    "layer-norm-without-bias": of_norm(LayerNorm(bias=False)),
    **{
        f"dense-{name}": of_layer(pre_norm(attention(), Dense(name, 20)))
        for name in ("gelu_tanh", "quick_gelu", "relu2", "silu", "tanh")
    },
    **{
        f"gated-{name}": of_layer(pre_norm(attention(), Gated(name, 20)))
        for name in ("gelu", "identity", "relu", "sigmoid")
    },
    "clamped-swish": of_layer(pre_norm(attention(), Gated(ClampedSwish(limit=0.5), 20, bias=True))),
    "experts-softmax": of_experts(Router()),
    "experts-not-normalised": of_experts(Router(normalise=False, scale=1.5)),
    "experts-sigmoid-balanced": of_experts(
        Router("sigmoid", scale=2.5, balance=True, groups=4, top_groups=2), shared_expert=ROUTED
    ),
    "experts-best-groups": of_experts(Router(normalise=False, groups=4, top_groups=2, group_best=1)),
    "experts-scaled-inputs": of_experts(
        Router("sigmoid", normalise=False, scales="input"), shared_expert=ROUTED
    ),
    "experts-clamped": of_experts(Router(bias=True), expert=Gated(ClampedSwish(limit=0.5), 12, bias=True)),
    "experts-dense": of_experts(Router(), expert=Dense("relu", 12)),
    "experts-shared-gate": of_experts(Router(), shared_expert=Gated("silu", 20), shared_gate=True),
}

# what Gemma 4, MiMo-V2 and Nemotron 3 brought
BESIDE = Sublayer(
    (Branch(attention(), RMSNorm(), RMSNorm()), Branch(Gated("silu", 20), after=RMSNorm())),
    after=RMSNorm(),
    post=Gate(),
)

VARIANTS |= {
    "values-are-keys": of(
        attention(
            projections=Projections(
                norm=RMSNorm(), values_are_keys=True, value_norm=RMSNorm(scale=False), value_scale=0.7
            )
        )
    ),
    "values-scaled": of(attention(value_dim=10, projections=Projections(bias="v", value_scale=0.7))),
    "query-scale-from-0": of(attention(position=None, score=Score(query_scale=LogScale(3, 0.2, first=0)))),
    "branches-normed-after": of_layer(Layer((BESIDE,))),
    "experts-latent": of_experts(Router("sigmoid", balance=True), latent=6, shared_expert=ROUTED),
    "experts-normed-apart": of_experts(Router(norm=RMSNorm(), logit_scale=0.5, gain=True), norm=RMSNorm()),
}

# the same parts looking both ways: no cache, and order only from positions
BIDIRECTIONAL: dict[str, Model] = {
    "bidirectional-none": of(attention(position=None, mask=Everything())),
    "bidirectional-rotary": of(attention(mask=Everything())),
    "bidirectional-window": of(attention(mask=Window(2, 2))),
    "bidirectional-buckets": of(attention(position=Buckets(8, 10, shared="distances"), mask=Everything())),
    **{
        f"bidirectional-{name}": of(attention(position=position, mask=Everything()))
        for name, position in BIASES.items()
    },
}

# experts that choose look both ways whatever the mask, and a capacity is counted over whole sequences
BIDIRECTIONAL |= {
    "bidirectional-experts": of_experts(Router(), attention(mask=Everything())),
    "experts-choose": of_experts(Router(normalise=False, chosen_by="experts")),
    "experts-with-capacity": of_experts(Router(normalise=False, capacity=1.0)),
}

# what tokens are made of, and what is answered for each of them
FURTHER = pre_norm(attention(), Gated("silu", 20), norm=RMSNorm())


def of_tokens(tokens: Tokens, head: Head, mask: Mask = Causal()) -> Model:
    layers = (pre_norm(attention(mask=mask), Gated("silu", 20), norm=RMSNorm()),) * 2
    return Model(decoder=Stack(tokens, layers, RMSNorm()), head=head)


VARIANTS |= {
    "token-types": of_tokens(Tokens(VOCAB, WIDTH, scale=4.0, types=2, norm=LayerNorm()), Language(VOCAB)),
    "tokens-widened": of_tokens(Tokens(VOCAB, WIDTH, table_width=5, position=Sinusoidal()), Language(VOCAB)),
    "tokens-projected": of_tokens(
        Tokens(VOCAB, 6, position=Learned(40), norm=LayerNorm(), projection=Project(WIDTH)),
        Language(VOCAB, bias=True, scale=0.5, cap=3.0, transform=Project(7, activation="gelu")),
    ),
    "several-ahead": of_tokens(
        Tokens(VOCAB, WIDTH, shared="tokens"), MultiToken(Language(VOCAB, shared="tokens"), (FURTHER,))
    ),
}
BIDIRECTIONAL |= {
    "masked-language": of_tokens(
        Tokens(VOCAB, WIDTH, position=Learned(40), types=2),
        MaskedLanguage(VOCAB, bias=True, transform=Project(WIDTH, activation="gelu", norm=LayerNorm())),
        Everything(),
    ),
    "token-class": of_tokens(
        Tokens(VOCAB, WIDTH, types=3), TokenClass(4, transform=Project(9, activation="tanh")), Everything()
    ),
    "span": of_tokens(Tokens(VOCAB, WIDTH), Span(), Everything()),
}

# an encoder alone: hidden states, or a head on them
ENCODER_LAYER = post_norm(attention(4, 4, position=None, mask=Everything()), Dense("gelu", 20))
BIDIRECTIONAL |= {
    "encoder-only": Model(
        Stack(Tokens(VOCAB, WIDTH, position=Learned(40), norm=LayerNorm()), (ENCODER_LAYER,))
    ),
    "encoder-with-head": Model(Stack(Tokens(VOCAB, WIDTH), (ENCODER_LAYER,) * 2), head=Language(VOCAB)),
}


def both(
    encoder: Layer,
    decoder: Layer,
    position: Position | None = None,
    norm: Norm | None = None,
    tied: bool = False,
) -> Model:
    """Two layers that read a source, and two that read those and what they wrote."""
    shared = "tokens" if tied else None
    tokens = Tokens(VOCAB, WIDTH, position=position, shared=shared)
    stacks = (Stack(tokens, (layer,) * 2, norm) for layer in (encoder, decoder))
    return Model(*stacks, head=Language(VOCAB, shared=shared))


def cross(heads: int = 4, kv_heads: int = 2, head_dim: int = 6, **parts: object) -> CrossAttention:
    return CrossAttention(heads, kv_heads, head_dim, WIDTH, **parts)  # type: ignore[arg-type]


LOOKING = attention(mask=Everything())

# an encoder, and a decoder that reads it: every call gives a source
ENCODER_DECODERS: dict[str, Model] = {
    "encoder-decoder-post-norm": both(
        ENCODER_LAYER,
        post_norm(attention(4, 4, position=None), cross(4, 4), Dense("relu", 20)),
        position=Sinusoidal(),
    ),
    "encoder-decoder-pre-norm": both(
        pre_norm(LOOKING, Dense("gelu", 20)),
        pre_norm(attention(), cross(), Dense("gelu", 20)),
        norm=LayerNorm(),
    ),
    "encoder-decoder-tied": both(
        ENCODER_LAYER, post_norm(attention(), cross(), Dense("relu", 20)), position=Learned(40), tied=True
    ),
    "encoder-decoder-of-all-parts": both(
        pre_norm(LOOKING, Gated("silu", 20), norm=RMSNorm()),
        sandwich(
            attention(mask=Causal() & Window(3)),
            cross(
                value_dim=5,
                score=Score(sink=True),
                projections=Projections(bias="qkvo", norm=RMSNorm(), gate="sigmoid"),
            ),
            Gated("silu", 20),
            norm=RMSNorm(),
        ),
        norm=RMSNorm(),
    ),
    "encoder-decoder-in-a-window": both(
        pre_norm(LOOKING, Dense("gelu", 20)),
        pre_norm(attention(), cross(mask=Window(3, 2)), Dense("gelu", 20)),
        norm=LayerNorm(),
    ),
    "state-space-with-cross": both(
        pre_norm(LOOKING, Dense("gelu", 20)),
        Layer((step(SPACE, before=RMSNorm()), step(cross(), before=RMSNorm(), gate=Gate(activation="tanh")))),
        norm=LayerNorm(),
    ),
}
