"""Encoders of text and of images, encoder-decoders, and a decoder that sees."""

from __future__ import annotations

from collections.abc import Callable

from qkv.spec import (
    Attention,
    Buckets,
    Causal,
    CrossAttention,
    Dense,
    Disentangled,
    Dot,
    Everything,
    Frames,
    Gated,
    Language,
    Layer,
    LayerNorm,
    Learned,
    MaskedLanguage,
    Model,
    Patches,
    Pool,
    PooledEmbedding,
    Project,
    Projections,
    Projector,
    RelativeTable,
    Replace,
    RMSNorm,
    Rotary,
    Score,
    Stack,
    Tokens,
    Tower,
    Window,
    post_norm,
    pre_norm,
    step,
)
from tests.spec.descriptions.common import BIASED
from tests.spec.descriptions.decoders import llama


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


def gemma3_vision(width: int = 5376) -> Tower:
    """SigLIP over 896 pixels; 4096 patches become 256 rows by averaging squares of 16."""
    vision = siglip_vision(layers=27, width=1152, heads=16, hidden=4304, size=14, image=896)
    assert vision.encoder is not None
    projector = Projector((Project(width, bias=False),), norm=RMSNorm(offset=1.0), pool=16)
    return Tower(vision.encoder, Replace(262144), projector)
