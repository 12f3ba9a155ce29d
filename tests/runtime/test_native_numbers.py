"""What is no number, or infinite, is seen as such: never as an answer, and only where it belongs."""

from __future__ import annotations

import numpy as np
import pytest

from qkv.checkpoints import FORMATS, StoredTensor
from qkv.runtime.interpreter import Rows
from qkv.runtime.lower import lower
from qkv.runtime.native import CACHE_TYPES, CacheType, Native
from qkv.spec import Attention, Dense, Gated, Language, Model, RMSNorm, Rotary, Stack, Tokens, pre_norm
from tests.matrix.variants import VARIANTS, VOCAB
from tests.runtime.native_models import SETS, changed, needs_native, tokens, weights

pytestmark = needs_native
EMBEDDING = "decoder.embedding.weight"
BROKEN = 3  # a token
LAYER = pre_norm(Attention(4, 2, 64, position=Rotary(100.0)), Gated("silu", 256), norm=RMSNorm())
WIDE = Model(decoder=Stack(Tokens(VOCAB, 256), (LAYER, LAYER), RMSNorm()), head=Language(VOCAB))
TEXT = [token for token in tokens(60, VOCAB) if token != BROKEN]


def finite(answers: np.ndarray) -> np.ndarray:
    """Of each row: whether it holds any number that could be taken for an answer."""
    return np.isfinite(answers).any(1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize("format", ["F32", "BF16", "Q4_1"])
@pytest.mark.parametrize("set_", SETS)
def test_a_broken_token_is_seen_from_where_it_stands_and_by_no_other_text(
    set_: str, format: str, cache_type: CacheType, value: float
) -> None:
    native = Native(lower(WIDE), weights(WIDE, format, 0.1), 2, cache_type, set_)
    whole = native.step(Rows.of(TEXT[:40]))
    native.forget(0)
    broken = changed(weights(WIDE, format, 0.1), EMBEDDING, BROKEN, value)
    # the table is stored in another form now; its other rows are the same
    native = Native(lower(WIDE), broken, 2, cache_type, set_)
    first = native.step(Rows.together(Rows.of(TEXT[:20]), Rows.of(TEXT[:9], 0, 1)))
    mixed = Rows.together(Rows.of([BROKEN, *TEXT[21:40]], 20), Rows.of(TEXT[9:40], 9, 1))
    second = native.step(mixed)
    assert not finite(second[:20]).any()
    assert np.array_equal(first[:20], whole[:20])
    assert np.array_equal(np.concatenate([first[20:], second[20:]]), whole)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize("set_", SETS)
def test_a_broken_token_is_not_seen_before_it_stands(set_: str, cache_type: CacheType) -> None:
    """In one step with it as in pieces, and no more once it is taken back."""
    given = weights(WIDE, "F32", 0.1)
    native = Native(lower(WIDE), changed(given, EMBEDDING, BROKEN, np.nan), 2, cache_type, set_)
    clean = native.step(Rows.of(TEXT[:8], sequence=1))
    found = native.step(Rows.of([*TEXT[:5], BROKEN, *TEXT[6:8]]))
    assert np.array_equal(found[:5], clean[:5]) and not finite(found[5:]).any()
    native.forget(0, 5)
    assert np.array_equal(native.step(Rows.of(TEXT[5:6], 5)), clean[5:6])


# every kind of activation, of bound and of sight that a number passes on its way
PATHS = (
    *("grouped", "window", "chunk", "cap", "sink", "alibi", "buckets", "biased", "clipped", "qk-norm"),
    *("gated-heads", "dense-relu2", "dense-gelu_tanh", "dense-quick_gelu", "dense-tanh", "gated-relu"),
    *("gated-gelu", "gated-sigmoid", "clamped-swish", "post-norm", "sandwich", "tokens-projected"),
    *("experts-clamped", "experts-dense", "experts-softmax"),
)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize("name", PATHS)
def test_one_broken_row_of_any_matrix_is_seen_in_every_answer(name: str, cache_type: CacheType) -> None:
    given, lowered = weights(VARIANTS[name]), lower(VARIANTS[name])
    matrices = [
        key
        for key, stored in given.items()
        if ".layers.0." in key and key.endswith("weight") and len(stored.shape) > 1 and "position" not in key
    ]
    assert len(matrices) >= 6
    text = tokens(36, VOCAB)
    for key in matrices:
        for set_ in SETS:
            native = Native(lowered, changed(given, key, 1, np.nan), 2, cache_type, set_)
            assert not finite(native.step(Rows.of(text))).any(), (key, set_)


# bytes of a block where a scale stands
SCALE = {"Q8_0": 0, "Q4_0": 0, "Q4_1": 2, "Q5_0": 0, "Q5_1": 2, "Q4_K": 2, "Q5_K": 0, "Q6_K": 208}


@pytest.mark.parametrize("bits", [0x7E00, 0x7C00, 0xFC00], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("format", SCALE)
@pytest.mark.parametrize("set_", SETS)
def test_one_broken_scale_of_quantised_weights_is_seen_in_every_answer(
    set_: str, format: str, bits: int
) -> None:
    given = dict(weights(WIDE, format, 0.1))
    name = "decoder.layers.1.feed_forward.up.weight"
    data = given[name].data.copy().reshape(256, -1)
    place = FORMATS[format].size * (256 // FORMATS[format].block - 1) + SCALE[format]
    data[77, place : place + 2] = np.array([bits], "<u2").view(np.uint8)
    given[name] = StoredTensor(name, (256, 256), format, data.reshape(-1))
    assert not finite(Native(lower(WIDE), given, 2, None, set_).step(Rows.of(TEXT[:15]))).any()


@pytest.mark.parametrize("format", ["Q8_0", "Q4_K"])
@pytest.mark.parametrize("set_", SETS)
def test_no_number_in_one_place_of_a_row_survives_its_rounding_to_bytes(set_: str, format: str) -> None:
    """One element of one token's row, with nothing but quantised products after it."""
    layer = pre_norm(Dense("relu", 256), norm=None)
    spec = Model(decoder=Stack(Tokens(VOCAB, 256), (layer,), None), head=Language(VOCAB))
    given = dict(weights(spec, format, 0.1))
    table = given[EMBEDDING].decode().copy()
    for token, value in ((1, np.nan), (2, np.inf), (3, -np.inf)):
        table[token, 37] = value
    given[EMBEDDING] = StoredTensor.from_array(EMBEDDING, table)
    found = Native(lower(spec), given, 2, None, set_).step(Rows.of([0, 1, 2, 3, 4]))
    assert finite(found).tolist() == [True, False, False, False, True]
    assert np.isfinite(found[[0, 4]]).all()
