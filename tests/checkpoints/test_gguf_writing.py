"""Writing GGUF: the `gguf` package and our own reader give back what was written; a failure leaves nothing.

The package is the oracle for the block formats, too: for those it quantises to, the bytes are equal.
"""

from __future__ import annotations

import errno
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from qkv.checkpoints import (
    ENCODERS,
    FORMATS,
    Outline,
    StoredTensor,
    quantise,
    quantisers,
    read_gguf,
    squared_error,
    write_gguf,
)
from qkv.errors import CheckpointError, RequestError, SourceError

SIMPLE = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
K = ["Q4_K", "Q5_K", "Q6_K"]
# on normal values, measured and rounded up; of the smaller formats 2 ** -bits is about as good as can be
BOUNDS = {
    "F32": 0.0,
    "F16": 2.5e-4,
    "BF16": 1.8e-3,
    "Q8_0": 5.5e-3,
    "Q6_K": 1.75e-2,
    "Q5_K": 3.6e-2,
    "Q5_1": 3.9e-2,
    "Q5_0": 4.4e-2,
    "Q4_K": 7.15e-2,
    "Q4_1": 8.0e-2,
    "Q4_0": 8.8e-2,
}


def random(*shape: int, seed: int = 0, tails: bool = False) -> np.ndarray:
    generator = np.random.default_rng(seed)
    values = generator.standard_t(4, shape) if tails else generator.standard_normal(shape)
    return (values * 0.05).astype(np.float32)


def error(values: np.ndarray, stored: StoredTensor) -> float:
    wrong, size = squared_error(values, stored)
    return float(np.sqrt(wrong / size))


def save(path: Path, metadata: dict[str, Any], tensors: dict[str, StoredTensor]) -> Path:
    outlines = {name: Outline(tensor.shape, tensor.format) for name, tensor in tensors.items()}
    write_gguf(path, metadata, outlines, tensors.__getitem__)
    return path


# the file

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "u8": np.uint8(200),
    "i8": np.int8(-5),
    "u16": np.uint16(60_000),
    "i16": np.int16(-30_000),
    "u32": 7,
    "i32": -7,
    "u64": 1 << 40,
    "i64": -(1 << 40),
    "most": (1 << 64) - 1,
    "f32": 0.5,
    "f64": 0.1,
    "infinite": float("inf"),
    "yes": True,
    "no": np.bool_(False),
    "text": "h\u00e9llo \u20ac",
    "empty text": "",
    "words": ["a", "", "\u20ac"],
    "nothing": [],
    "flags": [True, False, True],
    "whole": [1, -2, 3],
    "floats": [1.5, 2.5],
    "exact": [0.1],
    "typed": np.array([1, 2, 255], np.uint8),
}


def test_metadata_reads_back_equal_and_of_the_same_types(tmp_path: Path) -> None:
    path = save(tmp_path / "a.gguf", METADATA, {})
    ours, theirs = read_gguf(path).metadata, gguf.GGUFReader(path)
    assert list(ours) == list(METADATA)
    for key, value in METADATA.items():
        assert np.array_equal(ours[key], value), key
        field = theirs.get_field(key)
        assert field is not None and np.array_equal(field.contents(), value), key
    types = {key: [kind.name for kind in theirs.get_field(key).types] for key in METADATA}  # type: ignore[union-attr]
    for key in ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f32", "f64"):
        name = key.replace("u", "uint").replace("i", "int", 1) if key[0] == "i" else key.replace("u", "uint")
        assert types[key] == [name.replace("f", "float").upper()], key
    assert types["most"] == ["UINT64"] and types["yes"] == types["no"] == ["BOOL"]
    assert types["typed"] == ["ARRAY", "UINT8"] and types["whole"] == ["ARRAY", "INT32"]
    assert types["floats"] == ["ARRAY", "FLOAT32"] and types["exact"] == ["ARRAY", "FLOAT64"]


def test_texts_that_are_not_utf8_come_back_byte_for_byte(tmp_path: Path) -> None:
    text = b"caf\xc3\xa9 \xff\xfe".decode("utf-8", "surrogateescape")
    path = save(tmp_path / "a.gguf", {"text": text, "words": [text, "a"]}, {})
    assert b"caf\xc3\xa9 \xff\xfe" in path.read_bytes()
    assert read_gguf(path).metadata == {"text": text, "words": [text, "a"]}


def test_arrays_of_arrays(tmp_path: Path) -> None:
    path = save(tmp_path / "a.gguf", {"a": [[1, 2], ["x"], [[True]]]}, {})
    first, second, third = read_gguf(path).metadata["a"]
    assert (first.tolist(), second, third[0].tolist()) == ([1, 2], ["x"], [True])


@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_tensors_of_every_format_read_back_equal(tmp_path: Path, alignment: int) -> None:
    values = random(3, 5, 512)
    tensors = {f"{name}.weight": quantise(name, values, name) for name in ENCODERS}
    tensors["vector"] = StoredTensor.from_array("vector", random(7))
    tensors["scalar"] = StoredTensor.from_array("scalar", np.array(2.5, np.float32))
    tensors["ids"] = StoredTensor.from_array("ids", np.arange(6, dtype=np.int64).reshape(2, 3))
    path = save(tmp_path / "a.gguf", {"general.alignment": alignment, "b": "c"}, tensors)
    ours, theirs = read_gguf(path), {each.name: each for each in gguf.GGUFReader(path).tensors}
    assert list(ours.tensors) == list(tensors)
    for name, tensor in tensors.items():
        read = ours.tensors[name]
        assert (read.shape, read.format) == (tensor.shape, tensor.format), name
        assert np.array_equal(read.data, tensor.data), name
        assert tuple(theirs[name].shape[::-1]) == (tensor.shape or (1,)) or name == "scalar"
        assert theirs[name].tensor_type.name == tensor.format
        assert theirs[name].data.tobytes() == tensor.data.tobytes(), name
        assert theirs[name].data_offset % alignment == 0


def test_the_package_writes_the_same_bytes(tmp_path: Path) -> None:
    values = random(4, 64)
    writer = gguf.GGUFWriter(tmp_path / "theirs.gguf", "llama")
    writer.add_uint32("n", 5)
    writer.add_string("text", "abc")
    writer.add_array("words", ["x", "yz"])
    writer.add_tensor("w", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = {"general.architecture": "llama", "n": 5, "text": "abc", "words": ["x", "yz"]}
    save(tmp_path / "ours.gguf", metadata, {"w": StoredTensor.from_array("w", values)})
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


def test_one_tensor_is_held_at_a_time(tmp_path: Path) -> None:
    """Thirty tensors of 1 MB, made when they are asked for."""
    outlines = {f"w{i}": Outline((512, 512), "F32") for i in range(30)}
    tracemalloc.start()
    write_gguf(tmp_path / "a.gguf", {}, outlines, lambda n: quantise(n, random(512, 512), "F32"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / "a.gguf").stat().st_size > 30 << 20
    assert peak < 12 << 20


def refused(path: Path, message: str, metadata: dict[str, Any], tensors: dict[str, Outline]) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        write_gguf(path, metadata, tensors, lambda name: pytest.fail("nothing is to be written"))
    assert "\n" not in str(caught.value)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("message", "metadata"),
    [
        ("general.alignment is 48; it must be a power of two", {"general.alignment": 48}),
        ("general.alignment is True", {"general.alignment": True}),
        ("a holds a number that takes more than 64 bits", {"a": 1 << 64}),
        ("a is None, which GGUF has no type for", {"a": None}),
        ("a is .*, which GGUF has no type for", {"a": ["x", 1]}),
        ("a is of type complex128", {"a": np.array([1j])}),
        ("a is an array of 2 dimensions", {"a": np.zeros((2, 2))}),
        ("a holds text that is no Unicode", {"a": "\ud800"}),
        ("has 65,536 bytes; the format has 65,535", {"a" * 65_536: 1}),
    ],
)
def test_metadata_that_cannot_be_written(tmp_path: Path, message: str, metadata: dict[str, Any]) -> None:
    refused(tmp_path / "a.gguf", message, metadata, {})


@pytest.mark.parametrize(
    ("message", "name", "outline"),
    [
        ("tensor w is in BOOL, which GGUF has no type for", "w", Outline((2,), "BOOL")),
        ("tensor w is in Q9, which GGUF has no type for", "w", Outline((32,), "Q9")),
        (r"tensor w has the shape \[2, 0\]", "w", Outline((2, 0), "F32")),
        ("at most 4 dimensions", "w", Outline((1, 1, 1, 1, 1), "F32")),
        (
            r"tensor w has the shape \[2, 48\], whose rows are no multiple of 32",
            "w",
            Outline((2, 48), "Q8_0"),
        ),
        ("has 64 bytes; the format has 63", "w" * 64, Outline((2,), "F32")),
    ],
)
def test_tensors_that_cannot_be_written(tmp_path: Path, message: str, name: str, outline: Outline) -> None:
    refused(tmp_path / "a.gguf", message, {}, {name: outline})


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"before")

    def fail(name: str) -> StoredTensor:
        if name == "second":
            raise OSError(errno.ENOSPC, "No space left on device")
        return quantise(name, random(4), "F32")

    outlines = {"first": Outline((4,), "F32"), "second": Outline((4,), "F32")}
    with pytest.raises(CheckpointError, match=r"a\.gguf could not be written: No space left on device\.$"):
        write_gguf(path, {}, outlines, fail)
    with pytest.raises(CheckpointError, match=r"was announced as \[4\] in F32 and is \[5\] in F32"):
        write_gguf(path, {}, outlines, lambda name: quantise(name, random(5), "F32"))
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("a.gguf", b"before")]
    with pytest.raises(SourceError, match="is not a folder"):
        write_gguf(tmp_path / "none" / "a.gguf", {}, {}, fail)


def test_a_file_may_be_rewritten_from_itself(tmp_path: Path) -> None:
    path = save(tmp_path / "a.gguf", {}, {"w": quantise("w", random(2, 64), "F32")})
    before = read_gguf(path).tensors["w"]
    write_gguf(path, {"again": 1}, {"w": Outline((2, 64), "F32")}, lambda name: before)
    assert np.array_equal(read_gguf(path).tensors["w"].decode(), random(2, 64))


# block formats


@pytest.mark.parametrize("format", ENCODERS)
def test_errors_on_normal_values(format: str) -> None:
    values = random(64, 1024)
    stored = quantise("w", values, format)
    assert (stored.shape, stored.format) == (values.shape, format)
    assert 0.8 * BOUNDS[format] <= error(values, stored) <= BOUNDS[format]
    wrong = np.linalg.norm(values - stored.decode().astype(np.float32)) / np.linalg.norm(values)
    assert error(values, stored) == pytest.approx(wrong, rel=1e-4)


@pytest.mark.parametrize("format", ["F16", "BF16", *SIMPLE])
@pytest.mark.parametrize("tails", [False, True])
def test_bytes_are_those_of_the_package(format: str, tails: bool) -> None:
    for seed in range(5):
        values = random(40, 256, seed=seed, tails=tails)
        values[0] = 0
        values[1] = 3.25
        values[2, ::2] *= 1000
        values[3] = np.abs(values[3])
        wanted = gguf.quants.quantize(values, gguf.GGMLQuantizationType[format])
        assert np.array_equal(quantise("w", values, format).data, wanted.reshape(-1).view(np.uint8))


@pytest.mark.parametrize("format", K)
def test_the_package_reads_the_k_formats_as_we_do(format: str) -> None:
    stored = quantise("w", random(8, 512, tails=True), format)
    theirs = gguf.quants.dequantize(stored.data.reshape(8, -1), gguf.GGMLQuantizationType[format])
    assert np.array_equal(theirs, stored.decode())


@pytest.mark.parametrize(("format", "smaller"), [("Q4_K", "Q4_1"), ("Q5_K", "Q5_1"), ("Q6_K", "Q5_K")])
@pytest.mark.parametrize("tails", [False, True])
def test_a_search_beats_the_rule(format: str, smaller: str, tails: bool) -> None:
    """Q4_K has 4.5 bits a weight, Q4_1 5: less, and less error all the same."""
    values = random(64, 1024, seed=1, tails=tails)
    assert error(values, quantise("w", values, format)) < 0.97 * error(values, quantise("w", values, smaller))


@pytest.mark.parametrize(("format", "gain"), [("Q4_K", 0.003), ("Q5_K", 0.006), ("Q6_K", 0.0007)])
@pytest.mark.parametrize("tails", [False, True])
def test_fitting_the_common_factor_again_pays(
    format: str, gain: float, tails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small, and the file's size stays: .3 to .4, .7 and .1 per cent less error than without."""
    values = random(64, 1024, seed=1, tails=tails)
    fitted = error(values, quantise("w", values, format))
    monkeypatch.setattr(quantisers, "REFITS", 0)
    assert fitted < (1 - gain) * error(values, quantise("w", values, format))


@pytest.mark.parametrize(("format", "most"), [("Q4_K", 15), ("Q5_K", 31)])
def test_k_formats_are_no_worse_than_the_ends_of_each_run(format: str, most: int) -> None:
    """Scale and minimum from a run's extremes, unrounded: the search starts from there."""
    runs = random(64, 8, 32, seed=2, tails=True)
    low = np.minimum(runs.min(axis=2, keepdims=True), 0)
    step = (runs.max(axis=2, keepdims=True) - low) / most
    plain = low + step * np.rint((runs - low) / step)
    wrong = np.linalg.norm(plain - runs) / np.linalg.norm(runs)
    assert error(runs.reshape(64, 256), quantise("w", runs.reshape(64, 256), format)) < wrong


@pytest.mark.parametrize("format", [f for f in ENCODERS if f not in K])
@pytest.mark.parametrize("tails", [False, True])
def test_quantising_again_changes_nothing(format: str, tails: bool) -> None:
    once = quantise("w", random(64, 512, seed=3, tails=tails), format)
    again = quantise("w", once.decode(), format)
    assert np.array_equal(once.decode(), again.decode())
    assert np.array_equal(once.data, again.data)


@pytest.mark.parametrize("format", K)
def test_searching_again_changes_next_to_nothing(format: str) -> None:
    values = random(64, 512, seed=3, tails=True)
    once = quantise("w", values, format)
    again = quantise("w", once.decode(), format)
    assert error(once.decode(), again) < 0.15 * error(values, once)


@pytest.mark.parametrize("format", ENCODERS)
def test_zeros_and_constants(format: str) -> None:
    zeros = quantise("w", np.zeros((2, 256), np.float32), format).decode()
    assert (zeros == 0).all()
    for constant in (0.5, -0.5, 1e-3, -3.0):
        values = np.full((2, 256), constant, np.float32)
        assert error(values, quantise("w", values, format)) < 4e-3
    one = np.zeros((1, 256), np.float32)
    one[0, 77] = 2.0
    found = quantise("w", one, format).decode()
    assert found[0, 77] == pytest.approx(2.0, rel=5e-3) and np.count_nonzero(found) == 1


@pytest.mark.parametrize("format", [f for f in ENCODERS if f != "F32"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_no_number_is_refused_by_name(format: str, bad: float) -> None:
    values = random(4, 256)
    values[2, 100] = bad
    with pytest.raises(CheckpointError, match=f"tensor blk.0.w holds infinity or NaN, which {format}"):
        quantise("blk.0.w", values, format)


@pytest.mark.parametrize("format", ["F16", *SIMPLE, *K])
def test_what_is_too_large_is_refused_by_name(format: str) -> None:
    """The scale of Q8_0 is the largest value over 127, in float16, which ends at 65,504."""
    values = random(1, 256)
    values[0, 3] = 1e10
    with pytest.raises(CheckpointError, match=f"tensor w has values up to 1e\\+10, beyond what {format}"):
        quantise("w", values, format)


@pytest.mark.parametrize("format", [*SIMPLE, *K])
def test_rows_that_are_no_multiple_are_refused(format: str) -> None:
    block = FORMATS[format].block
    with pytest.raises(CheckpointError, match=f"tensor w .* no multiple of {block}"):
        quantise("w", np.zeros((block, block + 16), np.float32), format)


def test_a_format_that_is_not_written() -> None:
    with pytest.raises(RequestError, match="Q2_K cannot be written; these can: F32, F16"):
        quantise("w", np.zeros(256, np.float32), "Q2_K")


def test_other_types_of_numbers_are_taken() -> None:
    values = random(4, 64)
    for dtype in (np.float16, np.float64):
        same = quantise("w", values.astype(dtype).astype(np.float32), "Q8_0")
        assert np.array_equal(quantise("w", values.astype(dtype), "Q8_0").data, same.data)
    turned = np.asfortranarray(values)
    assert np.array_equal(quantise("w", turned, "Q8_0").data, quantise("w", values, "Q8_0").data)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(-18, 12), st.sampled_from([*SIMPLE, *K]), st.booleans())
def test_no_weight_is_farther_off_than_a_step_of_its_block(
    seed: int, power: int, format: str, positive: bool
) -> None:
    values = np.random.default_rng(seed).standard_normal((3, 256)).astype(np.float32) * 2.0**power
    values = np.abs(values) if positive else values
    found = quantise("w", values, format).decode()
    levels = {"Q4": 15, "Q5": 31, "Q6": 63, "Q8": 255}[format[:2]]
    span = np.maximum(np.abs(values).max(axis=1, keepdims=True) * 2, 1e-3)
    assert (np.abs(found - values) <= 1.7 * span / levels + 1e-6).all()
