"""Decoders of the ordinary kind: positions added, biasing or rotating; branches in turn or side by side."""

from __future__ import annotations

import math

from qkv.spec import (
    Alibi,
    Attention,
    Causal,
    Dense,
    Experts,
    Gated,
    HeadBiases,
    Interpolation,
    Language,
    Layer,
    LayerNorm,
    Learned,
    Llama3,
    LongRope,
    Mask,
    Model,
    Project,
    Projections,
    RelativeSinusoidal,
    RMSNorm,
    Rotary,
    Scaling,
    Score,
    Stack,
    Tokens,
    Tower,
    Window,
    parallel,
    post_norm,
    pre_norm,
    reordered,
    sandwich,
)
from tests.spec.descriptions.common import BIASED, tied


def gpt2(
    layers: int = 12, width: int = 768, heads: int = 12, vocab: int = 50257, context: int = 1024
) -> Model:
    """Radford et al. 2019: the Transformer's decoder, norms moved in front, positions learned."""
    layer = pre_norm(
        Attention(heads, heads, width // heads, projections=BIASED),
        Dense("gelu_tanh", 4 * width),
    )
    tokens = Tokens(vocab, width, position=Learned(context), shared="tokens")
    return Model(decoder=Stack(tokens, (layer,) * layers, LayerNorm()), head=Language(vocab, shared="tokens"))


def opt(layers: int = 12, width: int = 768, heads: int = 12, hidden: int = 3072, vocab: int = 50272) -> Model:
    """Zhang et al. 2022: GPT-3 with ReLU; the table of positions begins with two rows nobody reads."""
    layer = pre_norm(Attention(heads, heads, width // heads, projections=BIASED), Dense("relu", hidden))
    tokens = Tokens(vocab, width, position=Learned(2050, offset=2), shared="tokens")
    return Model(decoder=Stack(tokens, (layer,) * layers, LayerNorm()), head=Language(vocab, shared="tokens"))


def opt_350m(
    layers: int = 24,
    width: int = 1024,
    heads: int = 16,
    hidden: int = 4096,
    vocab: int = 50272,
    table: int = 512,
) -> Model:
    """The one OPT that is post-norm and keeps its tokens narrower than its stream, in and out."""
    layer = post_norm(Attention(heads, heads, width // heads, projections=BIASED), Dense("relu", hidden))
    tokens = Tokens(vocab, width, position=Learned(2050, offset=2), table_width=table, shared="tokens")
    head = Language(vocab, transform=Project(table, bias=False), shared="tokens")
    return Model(decoder=Stack(tokens, (layer,) * layers), head=head)


def bloom(layers: int = 70, width: int = 14336, heads: int = 112, vocab: int = 250880) -> Model:
    """Le Scao et al. 2022: distances cost score; the embedding is normalised."""
    layer = pre_norm(
        Attention(heads, heads, width // heads, position=Alibi(), projections=BIASED),
        Dense("gelu_tanh", 4 * width),
    )
    tokens = Tokens(vocab, width, norm=LayerNorm(), shared="tokens")
    return Model(decoder=Stack(tokens, (layer,) * layers, LayerNorm()), head=Language(vocab, shared="tokens"))


def mpt(
    layers: int = 32, width: int = 4096, heads: int = 32, vocab: int = 50432, clip: float | None = None
) -> Model:
    """MosaicML 2023: ALiBi, and not one bias anywhere."""
    norm = LayerNorm(bias=False)
    layer = pre_norm(
        Attention(heads, heads, width // heads, position=Alibi(8), projections=Projections(clip=clip)),
        Dense("gelu", 4 * width, bias=False),
        norm=norm,
    )
    tokens = Tokens(vocab, width, shared="tokens")
    return Model(decoder=Stack(tokens, (layer,) * layers, norm), head=Language(vocab, shared="tokens"))


def transformer_xl(
    layers: int = 12,
    width: int = 512,
    heads: int = 8,
    hidden: int = 2048,
    vocab: int = 204,
    untied: bool = False,
) -> Model:
    """Dai et al. 2019, enwik8: sinusoids of the distance; u and v one pair for all layers, or one each."""
    biases = HeadBiases(shared=None if untied else "biases")
    layer = post_norm(
        Attention(heads, heads, width // heads, position=RelativeSinusoidal(biases=biases)),
        Dense("relu", hidden),
    )
    tokens = Tokens(vocab, width, scale=math.sqrt(width), shared="tokens")
    head = Language(vocab, bias=True, shared="tokens")
    return Model(decoder=Stack(tokens, (layer,) * layers), head=head)


def llama(
    layers: int = 32,
    width: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    hidden: int = 14336,
    vocab: int = 128256,
    theta: float = 500_000.0,
    scaling: Scaling | None = Llama3(8, 1, 4, 8192),
    mask: Mask = Causal(),
    tie: bool = False,
) -> Model:
    """Touvron et al. 2023; as given, Llama 3.1 8B. With a window, Mistral (Jiang et al. 2023)."""
    norm = RMSNorm(1e-5)
    layer = pre_norm(
        Attention(heads, kv_heads, head_dim, position=Rotary(theta, scaling=scaling), mask=mask),
        Gated("silu", hidden),
        norm=norm,
    )
    stack = Stack(Tokens(vocab, width, shared=tied(tie)), (layer,) * layers, norm)
    return Model(decoder=stack, head=Language(vocab, shared=tied(tie)))


def mixtral(
    layers: int = 32,
    width: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    hidden: int = 14336,
    vocab: int = 32000,
    experts: int = 8,
    top_k: int = 2,
) -> Model:
    """Jiang et al. 2024: Mistral with eight feed-forwards of which each token takes two."""
    norm = RMSNorm(1e-5)
    layer = pre_norm(
        Attention(heads, kv_heads, head_dim, position=Rotary(1e6)),
        Experts(experts, top_k, Gated("silu", hidden)),
        norm=norm,
    )
    return Model(decoder=Stack(Tokens(vocab, width), (layer,) * layers, norm), head=Language(vocab))


def qwen2(
    layers: int = 28,
    width: int = 3584,
    heads: int = 28,
    kv_heads: int = 4,
    head_dim: int = 128,
    hidden: int = 18944,
    vocab: int = 152064,
    tie: bool = False,
) -> Model:
    """Qwen2.5 7B: Llama with biases on queries, keys and values."""
    norm = RMSNorm()
    layer = pre_norm(
        Attention(heads, kv_heads, head_dim, position=Rotary(1e6), projections=Projections(bias="qkv")),
        Gated("silu", hidden),
        norm=norm,
    )
    stack = Stack(Tokens(vocab, width, shared=tied(tie)), (layer,) * layers, norm)
    return Model(decoder=stack, head=Language(vocab, shared=tied(tie)))


def qwen3(
    layers: int = 36,
    width: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    vocab: int = 151936,
    feed_forward: Gated | Experts = Gated("silu", 12288),
    tie: bool = False,
) -> Model:
    """Qwen3 8B: no biases, each head's queries and keys normalised. With Experts, Qwen3-MoE."""
    norm = RMSNorm()
    attention = Attention(heads, kv_heads, head_dim, position=Rotary(1e6), projections=Projections(norm=norm))
    stack = Stack(
        Tokens(vocab, width, shared=tied(tie)), (pre_norm(attention, feed_forward, norm=norm),) * layers, norm
    )
    return Model(decoder=stack, head=Language(vocab, shared=tied(tie)))


def phi3(
    layers: int = 32,
    width: int = 3072,
    heads: int = 32,
    kv_heads: int = 32,
    hidden: int = 8192,
    vocab: int = 32064,
    scaling: LongRope | None = None,
) -> Model:
    """Phi-3-mini; the 128k variant divides each pair's frequency by a searched number."""
    norm = RMSNorm(1e-5)
    layer = pre_norm(
        Attention(heads, kv_heads, width // heads, position=Rotary(scaling=scaling)),
        Gated("silu", hidden),
        norm=norm,
    )
    return Model(decoder=Stack(Tokens(vocab, width), (layer,) * layers, norm), head=Language(vocab))


def granite(
    layers: int = 40,
    width: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    hidden: int = 12800,
    vocab: int = 49155,
) -> Model:
    """IBM Granite 3 8B: four fixed multipliers, on the embedding, the scores, the steps and the logits."""
    norm = RMSNorm(1e-5)
    layer = pre_norm(
        Attention(heads, kv_heads, width // heads, score=Score(0.0078125), position=Rotary(1e7)),
        Gated("silu", hidden),
        norm=norm,
        scale=0.22,
    )
    tokens = Tokens(vocab, width, scale=12.0, shared="tokens")
    head = Language(vocab, scale=1 / 16, shared="tokens")
    return Model(decoder=Stack(tokens, (layer,) * layers, norm), head=head)


def olmo2(
    layers: int = 32,
    width: int = 4096,
    heads: int = 32,
    kv_heads: int = 32,
    hidden: int = 11008,
    vocab: int = 100352,
) -> Model:
    """OLMo 2 7B: norms after the branches; queries and keys normalised over all heads at once."""
    norm = RMSNorm()
    layer = reordered(
        Attention(
            heads,
            kv_heads,
            width // heads,
            position=Rotary(500_000.0),
            projections=Projections(norm=norm, norm_over="all"),
        ),
        Gated("silu", hidden),
        norm=norm,
    )
    return Model(decoder=Stack(Tokens(vocab, width), (layer,) * layers, norm), head=Language(vocab))


def gemma3(
    layers: int = 62,
    width: int = 5376,
    heads: int = 32,
    kv_heads: int = 16,
    head_dim: int = 128,
    hidden: int = 21504,
    vocab: int = 262208,
    window: int = 1024,
    query_scalar: float = 168.0,
    towers: tuple[Tower, ...] = (),
) -> Model:
    """Gemma 3 27B, text: five layers with a window, then one without; norms around every branch."""
    norm = RMSNorm(offset=1.0)

    def layer(i: int) -> Layer:
        everywhere = (i + 1) % 6 == 0
        return sandwich(
            Attention(
                heads,
                kv_heads,
                head_dim,
                score=Score(query_scalar**-0.5),
                position=Rotary(1e6, scaling=Interpolation(8)) if everywhere else Rotary(1e4),
                mask=Causal() if everywhere else Causal() & Window(window),
                projections=Projections(norm=norm),
            ),
            Gated("gelu_tanh", hidden),
            norm=norm,
        )

    tokens = Tokens(vocab, width, scale=math.sqrt(width), shared="tokens")
    stack = Stack(tokens, tuple(map(layer, range(layers))), norm)
    return Model(decoder=stack, head=Language(vocab, shared="tokens"), towers=towers)


def gemma2(
    layers: int = 42,
    width: int = 3584,
    heads: int = 16,
    kv_heads: int = 8,
    head_dim: int = 256,
    hidden: int = 14336,
    vocab: int = 256000,
    window: int = 4096,
) -> Model:
    """Gemma 2 9B: every other layer has a window; scores and logits are capped."""
    norm = RMSNorm(offset=1.0)

    def layer(i: int) -> Layer:
        return sandwich(
            Attention(
                heads,
                kv_heads,
                head_dim,
                score=Score(256**-0.5, cap=50.0),
                position=Rotary(),
                mask=Causal() if i % 2 else Causal() & Window(window),
            ),
            Gated("gelu_tanh", hidden),
            norm=norm,
        )

    tokens = Tokens(vocab, width, scale=math.sqrt(width), shared="tokens")
    stack = Stack(tokens, tuple(map(layer, range(layers))), norm)
    return Model(decoder=stack, head=Language(vocab, cap=30.0, shared="tokens"))


def gpt_j(layers: int = 28, width: int = 4096, heads: int = 16, vocab: int = 50400, dims: int = 64) -> Model:
    """Wang and Komatsuzaki 2021: one norm feeds both branches; a quarter of a head turns, adjacent pairs."""
    layer = parallel(
        Attention(heads, heads, width // heads, position=Rotary(dims=dims, pairs="interleaved")),
        Dense("gelu_tanh", 4 * width),
    )
    stack = Stack(Tokens(vocab, width), (layer,) * layers, LayerNorm())
    return Model(decoder=stack, head=Language(vocab, bias=True))


def gpt_neox(
    layers: int = 44,
    width: int = 6144,
    heads: int = 64,
    hidden: int = 24576,
    vocab: int = 50432,
    dims: int = 24,
) -> Model:
    """Black et al. 2022 (20B): both branches read the same stream, each through a norm of its own."""
    layer = parallel(
        Attention(heads, heads, width // heads, position=Rotary(dims=dims), projections=BIASED),
        Dense("gelu", hidden),
        norms=2,
    )
    return Model(decoder=Stack(Tokens(vocab, width), (layer,) * layers, LayerNorm()), head=Language(vocab))


def cohere(
    layers: int = 40,
    width: int = 8192,
    heads: int = 64,
    kv_heads: int = 64,
    hidden: int = 22528,
    vocab: int = 256000,
    query_norm: bool = False,
) -> Model:
    """Command R (Plus: `query_norm`): one norm without bias, one scale a head; logits made smaller."""
    norm = LayerNorm(bias=False)
    layer = parallel(
        Attention(
            heads,
            kv_heads,
            width // heads,
            position=Rotary(500_000.0, pairs="interleaved"),
            projections=Projections(norm=norm if query_norm else None, norm_over="heads"),
        ),
        Gated("silu", hidden),
        norm=norm,
    )
    stack = Stack(Tokens(vocab, width, shared="tokens"), (layer,) * layers, norm)
    return Model(decoder=stack, head=Language(vocab, scale=0.0625, shared="tokens"))


def falcon(
    layers: int = 32,
    width: int = 4544,
    heads: int = 71,
    kv_heads: int = 1,
    vocab: int = 65024,
    norms: int = 1,
) -> Model:
    """Almazrouei et al. 2023: 7B with one norm and one key/value head; 40B with two norms and eight."""
    layer = parallel(
        Attention(heads, kv_heads, width // heads, position=Rotary()),
        Dense("gelu", 4 * width, bias=False),
        norms=norms,
    )
    stack = Stack(Tokens(vocab, width, shared="tokens"), (layer,) * layers, LayerNorm())
    return Model(decoder=stack, head=Language(vocab, shared="tokens"))
