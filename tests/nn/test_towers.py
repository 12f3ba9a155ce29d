"""Models that see and hear: images and audio as the input, read by cross-attention, or among the tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from qkv.errors import ConfigError, RequestError, UnsupportedError
from qkv.families import describe
from qkv.nn import ContiguousCache, Layout, Taps, Transformer, tap_names
from qkv.nn.towers import gathered
from qkv.spec import (
    Attention,
    Causal,
    CrossAttention,
    Dense,
    Everything,
    Frames,
    Gated,
    Language,
    Learned,
    Model,
    Patches,
    Project,
    Projector,
    Read,
    Replace,
    RMSNorm,
    Rotary,
    Sinusoidal,
    Stack,
    Tokens,
    Tower,
    pre_norm,
)
from tests.nn.transplant import fill, layers, randomised, transplanted
from tests.support import assert_close, random_model

BART_LAYER = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.out_proj",
    "attention_before": "self_attn_layer_norm",
    "feed_forward.up": "fc1",
    "feed_forward.down": "fc2",
    "feed_forward_before": "final_layer_norm",
}
BART_CROSS = {
    "cross.query": "encoder_attn.q_proj",
    "cross.key": "encoder_attn.k_proj",
    "cross.value": "encoder_attn.v_proj",
    "cross.output": "encoder_attn.out_proj",
    "cross_before": "encoder_attn_layer_norm",
}
CLIP_LAYER = {
    **BART_LAYER,
    "attention_before": "layer_norm1",
    "feed_forward.up": "mlp.fc1",
    "feed_forward.down": "mlp.fc2",
    "feed_forward_before": "layer_norm2",
}
VIT_LAYER = {
    "attention.query": "attention.q_proj",
    "attention.key": "attention.k_proj",
    "attention.value": "attention.v_proj",
    "attention.output": "attention.o_proj",
    "attention_before": "layernorm_before",
    "feed_forward.up": "mlp.fc1",
    "feed_forward.down": "mlp.fc2",
    "feed_forward_before": "layernorm_after",
}
LLAMA_LAYER = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention_before": "input_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
    "feed_forward_before": "post_attention_layernorm",
}
VISION: dict[str, Any] = {
    "hidden_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 28,
    "image_size": 12,
    "patch_size": 3,
    "num_channels": 2,
}
IMAGE = 60  # the token that an image's rows replace


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_tokens(batch: int, length: int, seed: int = 2) -> torch.Tensor:
    return torch.randint(4, 59, (batch, length), generator=torch.Generator().manual_seed(seed))


# --- ViT ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(12, 18), (13, 11)], ids=["even", "with a rest"])
def test_vit_classifies_images(size: tuple[int, int]) -> None:
    """Patches in reading order, a class token, positions on all rows; a rest at the edges is not read."""
    config = hf.ViTConfig(**{**VISION, "image_size": size}, num_labels=5)
    theirs = randomised(hf.ViTForImageClassification(config))
    names = {
        "encoder.embedding.class_token": "vit.embeddings.cls_token",
        "encoder.embedding.position.weight": "vit.embeddings.position_embeddings",
        "encoder.embedding.patch": "vit.embeddings.patch_embeddings.projection",
        **layers("encoder", "vit.layers", VIT_LAYER),
        "encoder.norm": "vit.layernorm",
        "head.output": "classifier",
    }
    ours = transplanted(theirs, names)
    images = noise(3, 2, *size)
    assert_close(ours(features=images), theirs(images).logits)
    taps = Taps(["embedding", "final"], tap_names(ours.spec))
    ours(features=images, tap=taps)
    assert_close(taps["embedding"], theirs.vit.embeddings(images))
    assert_close(taps["final"], theirs.vit(images).last_hidden_state)


# --- Whisper ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whisper() -> tuple[Any, Transformer]:
    config = hf.WhisperConfig(
        vocab_size=61,
        d_model=24,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=3,
        encoder_ffn_dim=40,
        decoder_ffn_dim=36,
        num_mel_bins=6,
        max_source_positions=10,
        max_target_positions=16,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=3,
        decoder_start_token_id=2,
    )
    names = {
        "encoder.embedding.convolution.0": "model.encoder.conv1",
        "encoder.embedding.convolution.1": "model.encoder.conv2",
        "encoder.embedding.position": "model.encoder.embed_positions",
        **layers("encoder", "model.encoder.layers", BART_LAYER),
        "encoder.norm": "model.encoder.layer_norm",
        "decoder.embedding": "model.decoder.embed_tokens",
        "decoder.embedding.position": "model.decoder.embed_positions",
        **layers("decoder", "model.decoder.layers", BART_LAYER | BART_CROSS),
        "decoder.norm": "model.decoder.layer_norm",
        "head": "proj_out",
    }
    theirs = randomised(hf.WhisperForConditionalGeneration(config))
    return theirs, transplanted(theirs, names)


def test_whisper_hears(whisper: tuple[Any, Transformer]) -> None:
    theirs, ours = whisper
    audio, tokens = noise(3, 6, 20), some_tokens(3, 7)
    expected = theirs(input_features=audio, decoder_input_ids=tokens)
    taps = Taps(["encoder.final"], tap_names(ours.spec))
    assert_close(ours(tokens, features=audio, tap=taps), expected.logits)
    assert_close(taps["encoder.final"], expected.encoder_last_hidden_state)


def test_audio_is_needed_once_with_a_cache(whisper: tuple[Any, Transformer]) -> None:
    _, ours = whisper
    audio, tokens = noise(3, 6, 20), some_tokens(3, 7)
    cache = ContiguousCache(ours.spec.trunk, 3, 7)
    pieces = [ours(tokens[:, :3], features=audio, cache=cache), ours(tokens[:, 3:4], cache=cache)]
    pieces.append(ours(tokens[:, 4:], cache=cache))
    assert_close(torch.cat(pieces, 1), ours(tokens, features=audio))


def test_silence_behind_the_end_of_audio_is_not_heard(whisper: tuple[Any, Transformer]) -> None:
    """Rows that are not there change nothing, whatever stands in their frames: nor does a convolution."""
    _, ours = whisper
    tokens, audio = some_tokens(1, 4), noise(1, 6, 20)
    alone = ours(tokens, features=audio[..., :12])
    present = torch.arange(10)[None] < 6
    beside = Layout.padded(present)
    assert_close(ours(tokens, features=audio, source_layout=beside), alone)
    audio[..., 12:] = 100.0
    assert_close(ours(tokens, features=audio, source_layout=beside), alone)


def test_audio_that_does_not_fit_is_refused(whisper: tuple[Any, Transformer]) -> None:
    _, ours = whisper
    tokens = some_tokens(2, 3)
    with pytest.raises(RequestError, match=r"Audio must be \(batch, 6, frames\); got \(2, 5, 20\)"):
        ours(tokens, features=noise(2, 5, 20))
    with pytest.raises(RequestError, match="There are 2 rows of tokens, and 3 of what is read beside"):
        ours(tokens, features=noise(3, 6, 20))
    with pytest.raises(RequestError, match="Position 10 has no row"):
        ours(tokens, features=noise(2, 6, 22))
    with pytest.raises(RequestError, match="reads audio, as features beside its tokens, and none"):
        ours(tokens)
    with pytest.raises(RequestError, match="no use for source"):
        ours(tokens, tokens, features=noise(2, 6, 20))


# --- LLaVA --------------------------------------------------------------------------------------


def llava(**changes: Any) -> tuple[Any, Transformer]:
    text = {
        "model_type": "llama",
        "vocab_size": 61,
        "hidden_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 52,
        "max_position_embeddings": 64,
    }
    config = hf.LlavaConfig(
        text_config=text,
        vision_config={**VISION, "model_type": "clip_vision_model"},
        image_token_index=IMAGE,
        **changes,
    )
    tower, text_model = "model.vision_tower", "model.language_model"
    names = {
        "towers.0.stack.embedding.class_token": f"{tower}.embeddings.class_embedding",
        "towers.0.stack.embedding.patch": f"{tower}.embeddings.patch_embedding",
        "towers.0.stack.embedding.position": f"{tower}.embeddings.position_embedding",
        "towers.0.stack.embedding.norm": f"{tower}.pre_layrnorm",
        **layers("towers.0.stack", f"{tower}.encoder.layers", CLIP_LAYER),
        "towers.0.stack.norm": f"{tower}.post_layernorm",
        "towers.0.projector.maps.0.linear": "model.multi_modal_projector.linear_1",
        "towers.0.projector.maps.1.linear": "model.multi_modal_projector.linear_2",
        "decoder.embedding": f"{text_model}.embed_tokens",
        **layers("decoder", f"{text_model}.layers", LLAMA_LAYER),
        "decoder.norm": f"{text_model}.norm",
        "head": "lm_head",
    }
    theirs = randomised(hf.LlavaForConditionalGeneration(config))
    return theirs, transplanted(theirs, names)


@pytest.fixture(scope="module")
def seeing() -> tuple[Any, Transformer]:
    return llava()


def with_images(rows: int = 16) -> torch.Tensor:
    """Two rows: one with two images, one with one; the rest is text."""
    tokens = some_tokens(2, 2 * rows + 5)
    tokens[0, 1 : 1 + rows] = tokens[0, 3 + rows : 3 + 2 * rows] = tokens[1, 4 : 4 + rows] = IMAGE
    return tokens


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"vision_feature_layer": -1},
        {"vision_feature_layer": -3},
        {"vision_feature_layer": 2, "vision_feature_select_strategy": "full"},
    ],
    ids=["as published", "last layer, before its norm", "first layer", "with the class token"],
)
def test_llava_sees(changes: dict[str, Any]) -> None:
    theirs, ours = llava(**changes)
    rows = 17 if "vision_feature_select_strategy" in changes else 16
    tokens, images = with_images(rows), noise(3, 2, 12, 12)
    expected = theirs(input_ids=tokens, pixel_values=images).logits
    assert_close(ours(tokens, features=images), expected)


def test_llava_reads_text_alone(seeing: tuple[Any, Transformer]) -> None:
    theirs, ours = seeing
    tokens = some_tokens(2, 9)
    assert_close(ours(tokens), theirs(input_ids=tokens).logits)


def test_images_keep_their_places_among_padding(seeing: tuple[Any, Transformer]) -> None:
    """A token in the padding that looks like an image's is none."""
    _, ours = seeing
    tokens, images = with_images(), noise(3, 2, 12, 12)
    present = torch.ones(2, 37, dtype=torch.bool)
    present[1, :3] = False
    tokens[1, :3] = IMAGE
    padded = ours(tokens, features=images, layout=Layout.padded(present))
    assert_close(padded[1, 3:], ours(tokens[1:, 3:], features=images[2:])[0])
    assert_close(padded[0], ours(tokens[:1], features=images[:2])[0])


def test_images_with_a_cache_come_with_the_call_that_holds_their_places(
    seeing: tuple[Any, Transformer],
) -> None:
    _, ours = seeing
    tokens, images = with_images()[:1], noise(2, 2, 12, 12)
    cache = ContiguousCache(ours.spec.trunk, 1, 37)
    parts = ((slice(0, 18), images[:1]), (slice(18, 36), images[1:]), (slice(36, 37), None))
    pieces = [ours(tokens[:, part], features=given, cache=cache) for part, given in parts]
    assert_close(torch.cat(pieces, 1), ours(tokens, features=images))


def test_images_and_places_must_agree(seeing: tuple[Any, Transformer]) -> None:
    _, ours = seeing
    tokens = with_images()
    with pytest.raises(RequestError, match="Token 60 stands for features at 48 places, and none"):
        ours(tokens)
    with pytest.raises(RequestError, match="The features make 32 rows, and 48 places hold token 60"):
        ours(tokens, features=noise(2, 2, 12, 12))
    with pytest.raises(RequestError, match=r"Images must be \(batch, 2, 12, 12\); got \(3, 2, 12, 15\)"):
        ours(tokens, features=noise(3, 2, 12, 15))
    with pytest.raises(RequestError, match="Features for 2 towers were given; this model has 1"):
        ours(tokens, features=[noise(3, 2, 12, 12), None])


def test_after_a_refused_image_a_cache_is_as_before(seeing: tuple[Any, Transformer]) -> None:
    _, ours = seeing
    tokens, images = with_images()[1:], noise(1, 2, 12, 12)
    cache = ContiguousCache(ours.spec.trunk, 1, 37)
    with pytest.raises(RequestError):
        ours(tokens, features=noise(2, 2, 12, 12), cache=cache)
    assert cache.length == 0
    assert_close(ours(tokens, features=images, cache=cache), ours(tokens, features=images))


# --- projectors ---------------------------------------------------------------------------------


def test_squares_of_neighbours_are_gathered_row_by_row() -> None:
    """A grid of 4 x 6, in squares of 2 x 2: each is read left to right, then down."""
    rows = torch.arange(24.0).view(1, 24, 1)
    groups, grid = gathered(rows, 4, (4, 6))
    assert grid == (2, 3)
    assert groups[0, :, :, 0].tolist() == [
        [0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11], [12, 13, 18, 19], [14, 15, 20, 21], [16, 17, 22, 23],
    ]  # fmt: skip
    flat, grid = gathered(rows, 3, None)
    assert grid is None and flat[0, :2, :, 0].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(("count", "grid"), [(4, (3, 4)), (3, (3, 3)), (5, None)])
def test_groups_that_do_not_come_out_even_are_refused(count: int, grid: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"rows do not divide into groups of {count}"):
        gathered(torch.zeros(1, 12, 1), count, grid)


def test_gemma_averages_squares_then_normalises() -> None:
    """The image's rows as they enter the text of Gemma 3."""
    config = hf.Gemma3Config(
        text_config={
            "vocab_size": 61,
            "hidden_size": 36,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "head_dim": 12,
            "num_key_value_heads": 2,
            "intermediate_size": 52,
        },
        vision_config={**VISION, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
    )
    theirs = randomised(hf.Gemma3ForConditionalGeneration(config))
    given = config.to_dict() | {"architectures": ["Gemma3ForConditionalGeneration"]}
    ours = Transformer(describe(given, "config.json").model).towers[0]
    tower, projector = "model.vision_tower", "model.multi_modal_projector"
    names = {
        "stack.embedding.patch": f"{tower}.embeddings.patch_embedding",
        "stack.embedding.position": f"{tower}.embeddings.position_embedding",
        "stack.norm": f"{tower}.post_layernorm",
        "projector.norm": f"{projector}.mm_soft_emb_norm",
        "projector.maps.0.linear": projector,
        **layers("stack", f"{tower}.encoder.layers", CLIP_LAYER),
    }
    state = theirs.state_dict()
    state[f"{projector}.weight"] = state[f"{projector}.mm_input_projection_weight"].T
    fill(ours, state, names)
    images = noise(2, 2, 12, 12)
    expected = theirs.model.get_image_features(images).pooler_output
    assert_close(ours(images), expected)


# --- by hand ------------------------------------------------------------------------------------

FEED = Dense("gelu", 20)


def around(**parts: Any) -> Attention:
    return Attention(2, 2, 8, mask=Everything(), **parts)


def images(**parts: Any) -> Stack:
    patches = Patches(2, 16, (4, 6), channels=1, bias=True, **parts)
    return Stack(patches, (pre_norm(around(), FEED),) * 2, RMSNorm())


def audio() -> Stack:
    frames = Frames(3, 16, kernel=4, strides=(2, 1, 2), activation="silu", position=Sinusoidal())
    return Stack(frames, (pre_norm(around(), FEED),))


def speaking(*towers: Tower, cross: bool = False) -> Model:
    mixers = (Attention(2, 1, 8, position=Rotary(100.0), mask=Causal()),)
    if cross:
        mixers += (CrossAttention(2, 2, 8, source_width=12),)  # type: ignore[assignment]
    layer = pre_norm(*mixers, Gated("silu", 20), norm=RMSNorm())
    tokens = Tokens(61, 16, position=Learned(40))
    return Model(decoder=Stack(tokens, (layer,) * 2, RMSNorm()), head=Language(61), towers=towers)


def test_two_towers_fill_places_of_their_own() -> None:
    """Six patches as rows of 58, three rows of audio as rows of 59, and each moves only what follows."""
    sees = Tower(images(), Replace(58), Projector((Project(16),)))
    hears = Tower(audio(), Replace(59), Projector((Project(16),), merge=2))
    model = random_model(speaking(sees, hears))
    tokens = torch.tensor([[1, *[58] * 6, 2, *[59] * 3, 3]])
    given = [noise(1, 1, 4, 6), noise(1, 3, 24)]
    both = model(tokens, features=given)
    other = model(tokens, features=[given[0], given[1] * 2])
    assert torch.equal(both[:, :8], other[:, :8]) and not torch.equal(both[:, 8:], other[:, 8:])
    with pytest.raises(RequestError, match="Token 59 stands for features at 3 places"):
        model(tokens, features=[given[0], None])


def test_the_rows_put_in_are_those_of_the_tower() -> None:
    """Placed by hand into the embedding, before positions are added, they give the same."""
    tower = Tower(images(class_token=True), Replace(58), Projector((Project(16),)), take_layer=1, first_row=1)
    model, tokens = random_model(speaking(tower)), torch.tensor([[1, *[58] * 6, 2]])
    given = noise(1, 1, 4, 6)
    taps = Taps(["towers.0.output", "embedding"], tap_names(model.spec))
    whole = model(tokens, features=given, tap=taps)
    table, places = model.decoder.embedding.weight, model.decoder.embedding.position.weight  # type: ignore
    rows = torch.cat([table[[1]], taps["towers.0.output"][0], table[[2]]])
    assert_close(taps["embedding"][0], rows + places[:8])
    zeroed = model(
        tokens, features=given, tap=Taps({"towers.0.output": lambda x: 0 * x}, tap_names(model.spec))
    )
    assert (zeroed - whole).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("take", "point"), [(0, "embedding"), (-3, "embedding"), (1, "layers.0.output"), (-1, "final")]
)
def test_a_tower_is_read_at_the_layer_it_says(take: int, point: str) -> None:
    model = random_model(speaking(Tower(images(), Replace(58), take_layer=take)))
    names = [f"towers.0.{point}", "towers.0.output"]
    taps = Taps(names, tap_names(model.spec))
    model(torch.tensor([[58] * 6]), features=noise(1, 1, 4, 6), tap=taps)
    assert torch.equal(taps[names[0]], taps[names[1]])


def test_a_tower_is_read_by_cross_attention() -> None:
    """Equal to the tower's rows given as the source, and needed once with a cache."""
    tower = Tower(images(), Read(), Projector((Project(12),)))
    model = random_model(speaking(tower, cross=True))
    tokens, given = some_tokens(2, 6), noise(2, 1, 4, 6)
    whole = model(tokens, features=given)
    other = model(tokens, features=torch.stack([given[0], 2 * given[1]]))
    assert torch.equal(whole[0], other[0]) and not torch.equal(whole[1], other[1])
    cache = ContiguousCache(model.spec.trunk, 2, 6)
    pieces = [model(tokens[:, :2], features=given, cache=cache), model(tokens[:, 2:], cache=cache)]
    assert_close(torch.cat(pieces, 1), whole)
    cache.reset()
    with pytest.raises(RequestError, match="reads features beside its tokens, and the call gives none"):
        model(tokens, cache=cache)
    with pytest.raises(RequestError, match="There are 2 rows of tokens, and 1 of what is read"):
        model(tokens, features=given[:1])


def test_what_towers_cannot_do_is_refused_by_name() -> None:
    sees = Tower(images(), Read(), Projector((Project(12),)))
    with pytest.raises(UnsupportedError, match="Two towers that cross-attention reads"):
        Transformer(speaking(sees, sees, cross=True))
    with pytest.raises(UnsupportedError, match="Towers feed a decoder of tokens alone"):
        Transformer(Model(encoder=images(), towers=(sees,)))
    with pytest.raises(ConfigError, match="A tower of 2 layers has no layer 3 to take"):
        tap_names(speaking(Tower(images(), Replace(58), take_layer=3)))


@pytest.mark.parametrize("frames", [24, 23, 21, 5])
def test_convolutions_equal_those_of_torch(frames: int) -> None:
    """Any kernel and strides: as many rows as the description says, and torch's values."""
    model = random_model(Model(encoder=audio()))
    x = noise(2, 3, frames)
    taps = Taps(["embedding"], tap_names(model.spec))
    model(features=x, tap=taps)
    for linear, stride in zip(model.encoder.embedding.convolution, (2, 1, 2), strict=True):  # type: ignore
        weight = linear.weight.view(16, -1, 4)
        x = torch.nn.functional.silu(
            torch.conv1d(torch.nn.functional.pad(x, (1, 2)), weight, linear.bias, stride=stride)
        )
    rows = model.spec.trunk.input.rows(frames)
    positions = model.encoder.embedding.position(torch.arange(rows)[None])  # type: ignore[union-attr]
    assert taps["embedding"].shape == (2, rows, 16)
    assert_close(taps["embedding"], x.transpose(1, 2) + positions)
