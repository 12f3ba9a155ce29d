"""Damaged files either read, or raise a `QkvError`; nothing else, and at no great cost."""

import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from qkv.checkpoints import StoredTensor, read_gguf, read_safetensors, write_safetensors
from qkv.errors import QkvError

LARGEST_PEAK = 8 << 20  # bytes; the files have about one thousand


def small_safetensors() -> bytes:
    tensors = {
        "a": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": StoredTensor("b", (8,), "BF16", np.zeros(16, np.uint8)),
        "c": np.array([True, False]),
        "d": np.array(7, np.int64),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.safetensors"
        write_safetensors(path, tensors, metadata={"format": "pt"})
        return path.read_bytes()


def small_gguf() -> bytes:
    gguf = pytest.importorskip("gguf")
    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder) / "a.gguf", "llama")
        writer.add_uint32("general.alignment", 32)
        writer.add_bool("flag", True)
        writer.add_float32("float", 0.5)
        writer.add_string("string", "text")
        writer.add_array("words", ["a", "bc", "def"])
        writer.add_array("numbers", [1, 2, 3])
        writer.add_array("flags", [True, False])
        writer.add_tensor("w", np.arange(12, dtype=np.float32).reshape(3, 4))
        for name in ("Q4_1", "Q8_0"):
            kind = gguf.GGMLQuantizationType[name]
            writer.add_tensor(name, gguf.quants.quantize(np.ones((2, 32), np.float32), kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return (Path(folder) / "a.gguf").read_bytes()


def read_all_of_gguf(path: Path) -> None:
    for tensor in read_gguf(path).tensors.values():
        tensor.decode()


def read_all_of_safetensors(path: Path) -> None:
    for tensor in read_safetensors(path).values():
        tensor.decode()


numbers = st.one_of(
    st.sampled_from([0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1]),
    st.integers(0, 2**64 - 1),
    st.integers(0, 300),
)
edits = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 2000), st.binary(min_size=1, max_size=8)),
        st.tuples(
            st.just("write"), st.integers(0, 2000), numbers.map(lambda value: value.to_bytes(8, "little"))
        ),
        st.tuples(st.just("insert"), st.integers(0, 2000), st.binary(min_size=1, max_size=40)),
        st.tuples(st.just("delete"), st.integers(0, 2000), st.binary(min_size=1, max_size=40)),
        st.tuples(st.just("cut"), st.integers(0, 2000), st.just(b"")),
    ),
    min_size=1,
    max_size=4,
)


def damaged(contents: bytes, changes: list[tuple[str, int, bytes]]) -> bytes:
    for change, place, piece in changes:
        at = place % (len(contents) + 1)
        after = at if change == "insert" else at + len(piece)
        kept = b"" if change == "delete" else piece
        contents = contents[:at] if change == "cut" else contents[:at] + kept + contents[after:]
    return contents


def reads_or_refuses(read: Callable[[Path], None], path: Path, contents: bytes) -> None:
    path.write_bytes(contents)
    tracemalloc.start()
    try:
        read(path)
    except QkvError as error:
        assert str(error).isprintable()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < LARGEST_PEAK


@pytest.mark.parametrize(
    ("read", "make"), [(read_all_of_gguf, small_gguf), (read_all_of_safetensors, small_safetensors)]
)
def test_every_single_byte_may_be_wrong(tmp_path, read, make):
    contents = make()
    read_path = tmp_path / "file"
    read_path.write_bytes(contents)
    read(read_path)
    for at in range(len(contents)):
        for value in (0x00, 0x01, 0x7F, 0x80, 0xFF, contents[at] ^ 1):
            reads_or_refuses(read, read_path, contents[:at] + bytes([value]) + contents[at + 1 :])


@pytest.fixture(scope="module")
def sound_gguf():
    return small_gguf()


@pytest.fixture(scope="module")
def sound_safetensors():
    return small_safetensors()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "file"


@settings(max_examples=400, deadline=None, derandomize=True)
@given(changes=edits)
def test_a_damaged_gguf_reads_or_is_refused(sound_gguf, place, changes):
    reads_or_refuses(read_all_of_gguf, place, damaged(sound_gguf, changes))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(changes=edits)
def test_a_damaged_safetensors_reads_or_is_refused(sound_safetensors, place, changes):
    reads_or_refuses(read_all_of_safetensors, place, damaged(sound_safetensors, changes))
