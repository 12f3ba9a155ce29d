"""Published Transformers described by hand: composed of parts of `qkv.spec` and of nothing else.

One function an architecture; called without arguments it gives the published model (or, where
none is small enough to name, what transformers takes as default), with sizes a small one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from qkv.spec import (
    Alibi,
    Attention,
    Buckets,
    Causal,
    Chunk,
    ClampedSwish,
    CrossAttention,
    Dense,
    Disentangled,
    Dot,
    Everything,
    Experts,
    Frames,
    Gated,
    GatedDelta,
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
    Patches,
    Pool,
    PooledEmbedding,
    Project,
    Projections,
    Projector,
    RelativeSinusoidal,
    RelativeTable,
    Replace,
    RMSNorm,
    Rotary,
    Router,
    Scaling,
    Score,
    Stack,
    StateSpace,
    Tokens,
    Tower,
    Window,
    Yarn,
    parallel,
    post_norm,
    pre_norm,
    reordered,
    sandwich,
    step,
)
from qkv.spec.rotary import mscale

BIASED = Projections(bias="qkvo")


def tied(yes: bool) -> str | None:
    return "tokens" if yes else None


# --- decoders with positions added or biasing ---------------------------------------------------


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


# --- rotary decoders ----------------------------------------------------------------------------


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


def gemma3_vision(width: int = 5376) -> Tower:
    """SigLIP over 896 pixels; 4096 patches become 256 rows by averaging squares of 16."""
    vision = siglip_vision(layers=27, width=1152, heads=16, hidden=4304, size=14, image=896)
    assert vision.encoder is not None
    projector = Projector((Project(width, bias=False),), norm=RMSNorm(offset=1.0), pool=16)
    return Tower(vision.encoder, Replace(262144), projector)


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


# --- both branches side by side -----------------------------------------------------------------


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


# --- experts, latents, hybrids ------------------------------------------------------------------


def deepseek_v3(
    layers: int = 61,
    width: int = 7168,
    heads: int = 128,
    head_dim: int = 128,
    rotary_dim: int = 64,
    value_dim: int = 128,
    rank: int = 512,
    query_rank: int | None = 1536,
    hidden: int = 18432,
    expert_hidden: int = 2048,
    experts: int = 256,
    shared_experts: int = 1,
    top_k: int = 8,
    groups: int = 8,
    top_groups: int = 4,
    dense_layers: int = 3,
    vocab: int = 129280,
) -> Model:
    """DeepSeek-AI 2024: a latent for the cache, many small experts chosen with a bias that only chooses."""
    norm = RMSNorm()
    yarn = Yarn(40, 4096, mscale=1.0, mscale_all_dim=1.0)
    attention = LatentAttention(
        heads,
        head_dim,
        rotary_dim,
        value_dim,
        rank,
        query_rank,
        score=Score((head_dim + rotary_dim) ** -0.5 * mscale(yarn.factor, 1.0) ** 2),
        position=Rotary(pairs="interleaved", scaling=yarn),
    )
    routed = Experts(
        experts,
        top_k,
        Gated("silu", expert_hidden),
        Router("sigmoid", scale=2.5, balance=True, groups=groups, top_groups=top_groups),
        shared_expert=Gated("silu", shared_experts * expert_hidden),
    )
    first, rest = (
        pre_norm(attention, Gated("silu", hidden), norm=norm),
        pre_norm(attention, routed, norm=norm),
    )
    stack = Stack(Tokens(vocab, width), (first,) * dense_layers + (rest,) * (layers - dense_layers), norm)
    return Model(decoder=stack, head=Language(vocab))


def gpt_oss(
    layers: int = 24,
    width: int = 2880,
    heads: int = 64,
    kv_heads: int = 8,
    head_dim: int = 64,
    hidden: int = 2880,
    experts: int = 32,
    top_k: int = 4,
    vocab: int = 201088,
    window: int = 128,
) -> Model:
    """OpenAI 2025 (20b): a sink a head, a window in every other layer, experts with a clamped swish."""
    norm = RMSNorm(1e-5)
    yarn = Yarn(32, 4096, truncate=False)

    def layer(i: int) -> Layer:
        return pre_norm(
            Attention(
                heads,
                kv_heads,
                head_dim,
                score=Score(sink=True),
                position=Rotary(150_000.0, scaling=yarn),
                mask=Causal() if i % 2 else Causal() & Window(window),
                projections=BIASED,
            ),
            Experts(experts, top_k, Gated(ClampedSwish(), hidden, bias=True), Router(bias=True)),
            norm=norm,
        )

    stack = Stack(Tokens(vocab, width), tuple(map(layer, range(layers))), norm)
    return Model(decoder=stack, head=Language(vocab))


def llama4(
    layers: int = 48,
    width: int = 5120,
    heads: int = 40,
    kv_heads: int = 8,
    head_dim: int = 128,
    hidden: int = 8192,
    dense_hidden: int = 16384,
    experts: int = 16,
    vocab: int = 202048,
    chunk: int = 8192,
    every: int = 1,
) -> Model:
    """Llama 4 Scout, text: three layers rotate within chunks, the fourth sees all and has no positions.

    `every`: which layers have experts (Maverick: every second).
    """
    norm = RMSNorm(1e-5)
    scaling = Llama3(16, 1, 1, 8192)

    def layer(i: int) -> Layer:
        local = Attention(
            heads,
            kv_heads,
            head_dim,
            position=Rotary(500_000.0, pairs="interleaved", scaling=scaling),
            mask=Causal() & Chunk(chunk),
            projections=Projections(norm=RMSNorm(1e-5, scale=False), norm_after_rotation=True),
        )
        everywhere = Attention(heads, kv_heads, head_dim, score=Score(query_scale=LogScale(8192, 0.1)))
        routed = Experts(
            experts,
            1,
            Gated("silu", hidden),
            Router("sigmoid", normalise=False, scales="input"),
            shared_expert=Gated("silu", hidden),
        )
        return pre_norm(
            everywhere if (i + 1) % 4 == 0 else local,
            routed if (i + 1) % every == 0 else Gated("silu", dense_hidden),
            norm=norm,
        )

    stack = Stack(Tokens(vocab, width), tuple(map(layer, range(layers))), norm)
    return Model(decoder=stack, head=Language(vocab))


def qwen3_next(
    layers: int = 48,
    width: int = 2048,
    heads: int = 16,
    kv_heads: int = 2,
    head_dim: int = 256,
    delta: GatedDelta = GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
    expert_hidden: int = 512,
    experts: int = 512,
    top_k: int = 10,
    vocab: int = 151936,
) -> Model:
    """Qwen3-Next 80B: three layers that keep a state of fixed size, then one of gated attention."""
    norm = RMSNorm(offset=1.0)
    attention = Attention(
        heads,
        kv_heads,
        head_dim,
        position=Rotary(1e7, dims=head_dim // 4),
        projections=Projections(norm=norm, gate="sigmoid"),
    )
    expert = Gated("silu", expert_hidden)
    routed = Experts(experts, top_k, expert, shared_expert=expert, shared_gate=True)
    stack = Stack(
        Tokens(vocab, width),
        tuple(pre_norm(attention if (i + 1) % 4 == 0 else delta, routed, norm=norm) for i in range(layers)),
        norm,
    )
    return Model(decoder=stack, head=Language(vocab))


def nemotron_h(
    pattern: str = "M-M-M-M*" + 9 * "-M-M-M-M-M*" + "-M-M-M-M-M-",
    width: int = 8192,
    heads: int = 64,
    kv_heads: int = 8,
    head_dim: int = 128,
    hidden: int = 32768,
    mamba: StateSpace = StateSpace(256, 64, 256, groups=8, norm=RMSNorm(1e-5)),
    vocab: int = 131072,
) -> Model:
    """NVIDIA 2025 (56B): layers of one branch, state spaces but for a few attentions without positions."""
    norm = RMSNorm(1e-5)
    mixers = {
        "M": mamba,
        "*": Attention(heads, kv_heads, head_dim),
        "-": Dense("relu2", hidden, bias=False),
    }
    layers = tuple(pre_norm(mixers[letter], norm=norm) for letter in pattern)
    return Model(decoder=Stack(Tokens(vocab, width), layers, norm), head=Language(vocab))


# --- encoders -----------------------------------------------------------------------------------


def bert_stack(
    layers: int, width: int, heads: int, hidden: int, vocab: int, share: str | None = None
) -> Stack:
    norm = LayerNorm(1e-12)
    layer = post_norm(
        Attention(heads, heads, width // heads, mask=Everything(), projections=BIASED),
        Dense("gelu", hidden),
        norm=norm,
    )
    tokens = Tokens(vocab, width, position=Learned(512), types=2, norm=norm, shared=share)
    return Stack(tokens, (layer,) * layers)


def bert(
    layers: int = 12, width: int = 768, heads: int = 12, hidden: int = 3072, vocab: int = 30522
) -> Model:
    """Devlin et al. 2018, with the pooler the sentence tasks read."""
    pooler = Pool("first", Project(width, activation="tanh"))
    return Model(encoder=bert_stack(layers, width, heads, hidden, vocab), head=pooler)


def bert_mlm(
    layers: int = 12, width: int = 768, heads: int = 12, hidden: int = 3072, vocab: int = 30522
) -> Model:
    """The same as pretrained: masked tokens guessed through one more layer, the table tied."""
    transform = Project(width, activation="gelu", norm=LayerNorm(1e-12))
    head = MaskedLanguage(vocab, bias=True, transform=transform, shared="tokens")
    return Model(encoder=bert_stack(layers, width, heads, hidden, vocab, "tokens"), head=head)


def albert(
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    hidden: int = 3072,
    vocab: int = 30000,
    table: int = 128,
) -> Model:
    """Lan et al. 2019 (base): one layer used again and again, over tokens kept narrow."""
    norm = LayerNorm(1e-12)
    repeated = post_norm(
        Attention(heads, heads, width // heads, mask=Everything(), projections=BIASED),
        Dense("gelu_tanh", hidden),
        norm=norm,
    )
    layer = Layer(repeated.sublayers, shared="layer")
    tokens = Tokens(vocab, table, position=Learned(512), types=2, norm=norm, projection=Project(width))
    pooler = Pool("first", Project(width, activation="tanh"))
    return Model(encoder=Stack(tokens, (layer,) * layers), head=pooler)


def electra(
    layers: int = 12,
    width: int = 256,
    heads: int = 4,
    hidden: int = 1024,
    vocab: int = 30522,
    table: int = 128,
) -> Model:
    """Clark et al. 2020 (small): BERT over tokens kept narrow."""
    norm = LayerNorm(1e-12)
    layer = post_norm(
        Attention(heads, heads, width // heads, mask=Everything(), projections=BIASED),
        Dense("gelu", hidden),
        norm=norm,
    )
    tokens = Tokens(vocab, table, position=Learned(512), types=2, norm=norm, projection=Project(width))
    return Model(encoder=Stack(tokens, (layer,) * layers))


def deberta(
    layers: int = 12, width: int = 768, heads: int = 12, hidden: int = 3072, vocab: int = 50265
) -> Model:
    """He et al. 2020 (v1): contents and distances scored apart, with projections of their own."""
    norm = LayerNorm(1e-7)
    position = Disentangled(RelativeTable(2 * 512, shared="distances"), max_distance=512, own=True)
    layer = post_norm(
        Attention(
            heads,
            heads,
            width // heads,
            score=Score((3 * width // heads) ** -0.5),
            position=position,
            mask=Everything(),
            projections=Projections(bias="qvo"),
        ),
        Dense("gelu", hidden),
        norm=norm,
    )
    return Model(encoder=Stack(Tokens(vocab, width, norm=norm), (layer,) * layers))


def deberta_v3(
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    hidden: int = 3072,
    vocab: int = 128100,
    buckets: int = 256,
) -> Model:
    """He et al. 2021 (v3 base): distances in logarithmic buckets, through the contents' own projections."""
    norm = LayerNorm(1e-7)
    table = RelativeTable(2 * buckets, norm=norm, shared="distances")
    layer = post_norm(
        Attention(
            heads,
            heads,
            width // heads,
            score=Score((3 * width // heads) ** -0.5),
            position=Disentangled(table, max_distance=512, buckets=buckets),
            mask=Everything(),
            projections=BIASED,
        ),
        Dense("gelu", hidden),
        norm=norm,
    )
    return Model(encoder=Stack(Tokens(vocab, width, norm=norm), (layer,) * layers))


def modernbert(
    layers: int = 22,
    width: int = 768,
    heads: int = 12,
    hidden: int = 1152,
    vocab: int = 50368,
    window: int = 128,
) -> Model:
    """Warner et al. 2024: rotary and gated, two of three layers see `window` / 2 to either side."""
    norm = LayerNorm(bias=False)

    def layer(i: int) -> Layer:
        attention = Attention(
            heads,
            heads,
            width // heads,
            position=Rotary(10_000.0 if i % 3 else 160_000.0),
            mask=Window(window // 2 + 1, window // 2) if i % 3 else Everything(),
        )
        # the embedding is normalised already: the first attention has no norm of its own
        first = step(attention, before=norm if i else None)
        return Layer((first, step(Gated("gelu", hidden), before=norm)))

    stack = Stack(Tokens(vocab, width, norm=norm, shared="tokens"), tuple(map(layer, range(layers))), norm)
    transform = Project(width, bias=False, activation="gelu", norm=norm)
    return Model(encoder=stack, head=MaskedLanguage(vocab, bias=True, transform=transform, shared="tokens"))


# --- encoder and decoder ------------------------------------------------------------------------


def t5(
    encoder_layers: int = 24,
    decoder_layers: int = 24,
    width: int = 1024,
    heads: int = 16,
    head_dim: int = 64,
    hidden: int = 4096,
    vocab: int = 32128,
    version: str = "1.0",
) -> Model:
    """Raffel et al. 2019 (large): scores not scaled, distances in buckets, one table a stack.

    1.0 has a ReLU and ties its head, whose logits are scaled for it; 1.1 is gated and ties nothing there.
    """
    norm = RMSNorm()
    old = version == "1.0"
    feed_forward = Dense("relu", hidden, bias=False) if old else Gated("gelu_tanh", hidden)

    def attention(side: str) -> Attention:
        both_ways = side == "encoder"
        return Attention(
            heads,
            heads,
            head_dim,
            score=Dot(),
            position=Buckets(bidirectional=both_ways, shared=f"{side} distances"),
            mask=Everything() if both_ways else Causal(),
        )

    cross = CrossAttention(heads, heads, head_dim, source_width=width, score=Dot())
    tokens = Tokens(vocab, width, shared="tokens")
    return Model(
        encoder=Stack(
            tokens, (pre_norm(attention("encoder"), feed_forward, norm=norm),) * encoder_layers, norm
        ),
        decoder=Stack(
            tokens, (pre_norm(attention("decoder"), cross, feed_forward, norm=norm),) * decoder_layers, norm
        ),
        head=Language(vocab, scale=width**-0.5, shared="tokens") if old else Language(vocab),
    )


def bart(
    layers: int = 12,
    width: int = 1024,
    heads: int = 16,
    hidden: int = 4096,
    vocab: int = 50265,
    context: int = 1024,
) -> Model:
    """Lewis et al. 2019 (large): the original arrangement; one token table, positions and norms a stack."""
    head_dim = width // heads
    feed_forward = Dense("gelu", hidden)
    tokens = Tokens(vocab, width, position=Learned(context + 2, offset=2), norm=LayerNorm(), shared="tokens")
    around = Attention(heads, heads, head_dim, mask=Everything(), projections=BIASED)
    before = Attention(heads, heads, head_dim, projections=BIASED)
    cross = CrossAttention(heads, heads, head_dim, source_width=width, projections=BIASED)
    return Model(
        encoder=Stack(tokens, (post_norm(around, feed_forward),) * layers),
        decoder=Stack(tokens, (post_norm(before, cross, feed_forward),) * layers),
        head=Language(vocab, shared="tokens"),
    )


def whisper(
    encoder_layers: int = 6,
    decoder_layers: int = 6,
    width: int = 512,
    heads: int = 8,
    hidden: int = 2048,
    vocab: int = 51865,
    bins: int = 80,
) -> Model:
    """Radford et al. 2022 (base): convolutions over a spectrogram first; keys have no bias."""
    through = Projections(bias="qvo")
    feed_forward = Dense("gelu", hidden)
    around = Attention(heads, heads, width // heads, mask=Everything(), projections=through)
    before = Attention(heads, heads, width // heads, projections=through)
    cross = CrossAttention(heads, heads, width // heads, source_width=width, projections=through)
    frames = Frames(bins, width, position=Learned(1500))  # sinusoids when trained, stored as a table
    tokens = Tokens(vocab, width, position=Learned(448), shared="tokens")
    return Model(
        encoder=Stack(frames, (pre_norm(around, feed_forward),) * encoder_layers, LayerNorm()),
        decoder=Stack(tokens, (pre_norm(before, cross, feed_forward),) * decoder_layers, LayerNorm()),
        head=Language(vocab, shared="tokens"),
    )


# --- images -------------------------------------------------------------------------------------


def vit(
    layers: int = 12, width: int = 768, heads: int = 12, hidden: int = 3072, size: int = 16, image: int = 224
) -> Model:
    """Dosovitskiy et al. 2020 (B/16), with the pooler transformers adds."""
    norm = LayerNorm(1e-12)
    layer = pre_norm(
        Attention(heads, heads, width // heads, mask=Everything(), projections=BIASED),
        Dense("gelu", hidden),
        norm=norm,
    )
    rows = (image // size) ** 2 + 1
    patches = Patches(size, width, (image, image), bias=True, class_token=True, position=Learned(rows))
    return Model(
        encoder=Stack(patches, (layer,) * layers, norm),
        head=Pool("first", Project(width, activation="tanh")),
    )


def siglip_vision(
    layers: int = 12, width: int = 768, heads: int = 12, hidden: int = 3072, size: int = 16, image: int = 224
) -> Model:
    """Zhai et al. 2023: no class token. The bare encoder."""
    norm = LayerNorm(1e-6)
    layer = pre_norm(
        Attention(heads, heads, width // heads, mask=Everything(), projections=BIASED),
        Dense("gelu_tanh", hidden),
        norm=norm,
    )
    patches = Patches(size, width, (image, image), bias=True, position=Learned((image // size) ** 2))
    return Model(encoder=Stack(patches, (layer,) * layers, norm))


def clip_vision(
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    hidden: int = 3072,
    size: int = 32,
    image: int = 224,
    projection: int | None = None,
) -> Model:
    """Radford et al. 2021 (B/32): normalised before the first layer; the class token is the answer."""
    layer = pre_norm(
        Attention(heads, heads, width // heads, mask=Everything(), projections=BIASED),
        Dense("quick_gelu", hidden),
    )
    rows = (image // size) ** 2 + 1
    patches = Patches(size, width, (image, image), class_token=True, position=Learned(rows), norm=LayerNorm())
    pool = Pool("first", Project(projection, bias=False) if projection else None)
    return Model(encoder=Stack(patches, (layer,) * layers, LayerNorm()), head=PooledEmbedding(pool))


def clip_text(
    layers: int = 12,
    width: int = 512,
    heads: int = 8,
    hidden: int = 2048,
    vocab: int = 49408,
    projection: int | None = None,
) -> Model:
    """The other half: causal, and the last token (end of text) is the answer."""
    layer = pre_norm(Attention(heads, heads, width // heads, projections=BIASED), Dense("quick_gelu", hidden))
    pool = Pool("last", Project(projection, bias=False) if projection else None)
    stack = Stack(Tokens(vocab, width, position=Learned(77)), (layer,) * layers, LayerNorm())
    return Model(encoder=stack, head=PooledEmbedding(pool))


def llava(
    text: Callable[[], Model] | None = None, vision: Callable[[], Model] | None = None, token: int = 32000
) -> Model:
    """Liu et al. 2023 (1.5, 7B): CLIP's patches before its last layer, two maps, in the place of a token."""
    language = text() if text else llama2(vocab=32064)
    seeing = vision() if vision else clip_vision(24, 1024, 16, 4096, size=14, image=336)
    assert language.decoder is not None and seeing.encoder is not None
    width = language.decoder.width
    tower = Tower(
        seeing.encoder,
        Replace(token),
        Projector((Project(width, activation="gelu"), Project(width))),
        take_layer=-2,
        first_row=1,  # not the class token
    )
    return Model(decoder=language.decoder, head=language.head, towers=(tower,))


def llama2(vocab: int = 32000) -> Model:
    """Touvron et al. 2023b, 7B."""
    return llama(kv_heads=32, hidden=11008, vocab=vocab, theta=10_000.0, scaling=None)


ALL: dict[str, Callable[[], Model]] = {
    f.__name__: f  # type: ignore[misc]
    for f in (
        gpt2, opt, opt_350m, bloom, mpt, transformer_xl, llama, llama2, mixtral, qwen2, qwen3, phi3, granite,
        olmo2, gemma2, gemma3, gpt_j, gpt_neox, cohere, falcon, deepseek_v3, gpt_oss, llama4, qwen3_next,
        nemotron_h,
        bert, bert_mlm, albert, electra, deberta, deberta_v3, modernbert, t5, bart, whisper, vit,
        siglip_vision, clip_vision, clip_text, llava,
    )
}  # fmt: skip
