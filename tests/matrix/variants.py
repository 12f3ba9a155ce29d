"""Every variant the invariants are held over. A new one joins in one line."""

from __future__ import annotations

from qkv.spec import (
    NTK,
    Attention,
    Causal,
    Chunk,
    Dense,
    Dilated,
    DynamicNTK,
    Everything,
    Gated,
    Global,
    Interpolation,
    Language,
    Layer,
    LayerNorm,
    Learned,
    Llama3,
    LogScale,
    LongRope,
    Model,
    Norm,
    Position,
    Projections,
    RMSNorm,
    Rotary,
    Score,
    Sinusoidal,
    Stack,
    Strided,
    Tokens,
    Window,
    Yarn,
    parallel,
    post_norm,
    pre_norm,
    reordered,
    sandwich,
)

VOCAB, WIDTH = 50, 16
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
    # masks
    "window": of(attention(mask=Causal() & Window(3))),
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

# the same parts looking both ways: no cache, and order only from positions
BIDIRECTIONAL: dict[str, Model] = {
    "bidirectional-none": of(attention(position=None, mask=Everything())),
    "bidirectional-rotary": of(attention(mask=Everything())),
    "bidirectional-window": of(attention(mask=Window(2, 2))),
}
