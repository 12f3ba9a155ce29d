"""What a sequence keeps between steps, in bytes; and what weights are called."""

from __future__ import annotations

import pytest

from qkv.errors import ConfigError
from qkv.spec import (
    Attention,
    Causal,
    Gated,
    Language,
    Layer,
    Mask,
    Model,
    Stack,
    Tokens,
    Window,
    pre_norm,
)
from tests.spec import descriptions as of

# --- cache ------------------------------------------------------------------------------------


def of_layers(*attentions: Attention) -> Model:
    return Model(decoder=Stack(Tokens(11, 8), tuple(pre_norm(attention) for attention in attentions)))


def test_cache_counts_key_value_heads() -> None:
    """Case L1."""
    model = of_layers(*(Attention(32, 8, 128),) * 32)
    assert model.cache_bytes(1) == 131_072
    assert model.cache_bytes(8192) == 2**30
    assert of_layers(*(Attention(32, 32, 128),) * 32).cache_bytes(8192) == 4 * 2**30


def test_window_layers_keep_their_window() -> None:
    """Case L3."""

    def model(layers: int, every: int, window: int, kv_heads: int, head_dim: int) -> Model:
        def mask(i: int) -> Mask:
            return Causal() if (i + 1) % every == 0 else Causal() & Window(window)

        return of_layers(*(Attention(kv_heads, kv_heads, head_dim, mask=mask(i)) for i in range(layers)))

    assert model(62, 6, 1024, 16, 128).cache_bytes(131_072) == 11_173_625_856
    assert of_layers(*(Attention(16, 16, 128),) * 62).cache_bytes(131_072) == 66_571_993_088
    assert model(6, 6, 8, 2, 4).cache_bytes(32) == 2304
    assert of_layers(*(Attention(2, 2, 4),) * 6).cache_bytes(32) == 6144


def test_a_latent_is_kept_once() -> None:
    """Case L5."""
    model = of.deepseek_v3()
    assert model.cache_bytes(1) == 70_272
    assert model.cache_bytes(163_840) == 11_513_364_480


def test_cache_of_published_models_in_full_context() -> None:
    """D31: 2 GiB, 16 GiB, and 512 MiB however long."""
    assert of.llama2().cache_bytes(4096) == 2 * 2**30
    assert of.llama().cache_bytes(131_072) == 16 * 2**30
    mistral = of.llama(vocab=32000, theta=1e4, scaling=None, mask=Causal() & Window(4096))
    assert mistral.cache_bytes(32_768) == mistral.cache_bytes(4096) == 512 * 2**20
    assert mistral.cache_bytes(4095) == 4095 * 131_072


def test_cache_of_published_models_a_token() -> None:
    """D31: 512, 128 and 320 KiB; DeepSeek-V3 68.6, and 3,904 if every head kept its own."""
    kib = 1024
    assert of.llama2().cache_bytes(1) == 512 * kib
    assert of.llama().cache_bytes(1) == 128 * kib
    assert of.llama(80, 8192, 64, 8, 128, 28672, 32000).cache_bytes(1) == 320 * kib
    assert of.deepseek_v3().cache_bytes(1) == 61 * 576 * 2 == pytest.approx(68.6 * kib, rel=1e-3)
    assert of_layers(*(Attention(128, 128, 128),) * 61).cache_bytes(1) == 3904 * kib


def test_chunks_states_and_sources_have_caches_of_their_own() -> None:
    scout = of.llama4()
    per_token = 2 * 8 * 128 * 2
    assert scout.cache_bytes(100_000) == per_token * (36 * 8192 + 12 * 100_000)
    # a state is fp32 whatever the cache's type, and has no length
    hybrid = of.qwen3_next()
    state, inputs = 36 * 32 * 128 * 128, 36 * 3 * (2 * 16 * 128 + 32 * 128)
    assert hybrid.cache_bytes(0) == 4 * state + 2 * inputs
    assert hybrid.cache_bytes(10, bytes_per_value=1) == 4 * state + inputs + 12 * 2 * 2 * 256 * 10
    nemotron = of.nemotron_h()
    state, inputs = 54 * 256 * 64 * 256, 54 * 3 * (256 * 64 + 2 * 8 * 256)
    assert nemotron.cache_bytes(10) == 4 * state + 2 * (inputs + 10 * 2 * 8 * 128 * 10)
    # whisper: 3000 spectrogram frames are 1500 rows
    assert of.whisper().cache_bytes(7, source=3000) == 2 * 6 * 2 * 512 * (7 + 1500)
    assert of.bert().cache_bytes(512) == 0


# --- names ------------------------------------------------------------------------------------


def test_weights_by_name() -> None:
    weights = of.gpt2(1, 4, 2, 11, 6).weights()
    assert {name: tensor.shape for name, tensor in weights.items()} == {
        "decoder.embedding.weight": (11, 4),
        "decoder.embedding.position.weight": (6, 4),
        "decoder.layers.0.attention_before.weight": (4,),
        "decoder.layers.0.attention_before.bias": (4,),
        "decoder.layers.0.attention.query.weight": (4, 4),
        "decoder.layers.0.attention.query.bias": (4,),
        "decoder.layers.0.attention.key.weight": (4, 4),
        "decoder.layers.0.attention.key.bias": (4,),
        "decoder.layers.0.attention.value.weight": (4, 4),
        "decoder.layers.0.attention.value.bias": (4,),
        "decoder.layers.0.attention.output.weight": (4, 4),
        "decoder.layers.0.attention.output.bias": (4,),
        "decoder.layers.0.feed_forward_before.weight": (4,),
        "decoder.layers.0.feed_forward_before.bias": (4,),
        "decoder.layers.0.feed_forward.up.weight": (16, 4),
        "decoder.layers.0.feed_forward.up.bias": (16,),
        "decoder.layers.0.feed_forward.down.weight": (4, 16),
        "decoder.layers.0.feed_forward.down.bias": (4,),
        "decoder.norm.weight": (4,),
        "decoder.norm.bias": (4,),
    }


@pytest.mark.parametrize("name", of.ALL)
def test_names_are_unique_and_shared_tensors_agree(name: str) -> None:
    tensors = list(of.ALL[name]().tensors())
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for tensor in tensors:
        shapes.setdefault(tensor.key, set()).add(tensor.shape)
        assert 0 < tensor.used <= tensor.size
    assert all(len(found) == 1 for found in shapes.values())


def test_a_shared_name_covers_a_table_and_not_what_is_added_to_it() -> None:
    names = of.bart(1, 4, 2, 5, 11, 6).weights()
    assert [name for name in names if "embedding" in name or "head" in name] == [
        f"{side}.embedding.{part}"
        for side, parts in (
            ("encoder", ("weight", "position.weight", "norm.weight", "norm.bias")),
            ("decoder", ("position.weight", "norm.weight", "norm.bias")),
        )
        for part in parts
    ]


def test_a_shared_layer_is_stored_once() -> None:
    layer = Layer(pre_norm(Attention(2, 2, 2), Gated("silu", 5)).sublayers, shared="all")
    once, often = (Model(decoder=Stack(Tokens(11, 4), (layer,) * n)) for n in (1, 9))
    assert once.weights() == often.weights()
    assert often.flops(6) == 9 * once.flops(6)


def test_a_shared_name_over_two_shapes_is_refused() -> None:
    model = Model(decoder=Stack(Tokens(100, 8, shared="t"), ()), head=Language(50, shared="t"))
    with pytest.raises(ConfigError, match=r"head.weight \(50, 8\) share a name"):
        model.parameters()
