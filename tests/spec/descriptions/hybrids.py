"""Decoders with experts, latents, or mixers other than attention."""

from __future__ import annotations

from qkv.spec import (
    Attention,
    Causal,
    Chunk,
    ClampedSwish,
    Dense,
    Experts,
    Gated,
    GatedDelta,
    Language,
    LatentAttention,
    Layer,
    Llama3,
    LogScale,
    Model,
    Projections,
    RMSNorm,
    Rotary,
    Router,
    Score,
    Stack,
    StateSpace,
    Tokens,
    Window,
    Yarn,
    pre_norm,
)
from qkv.spec.rotary import mscale
from tests.spec.descriptions.common import BIASED


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
