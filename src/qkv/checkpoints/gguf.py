"""GGUF: metadata and tensors in one file.

The format (ggml, docs/gguf.md), little-endian throughout:

    "GGUF", version u32, tensor count u64, key count u64
    key count x     key string, value type u32, value
    tensor count x  name string, dimension count u32, dimensions u64 (innermost first), type u32, offset u64
    padding to the alignment, then the data that the offsets count from

    string = length u64, bytes;  array = value type u32, count u64, values

Every number in a file is taken as hostile: a count is compared with what the remaining bytes could hold
before anything is allocated, and Python's integers do not overflow.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from qkv.checkpoints.formats import FORMATS
from qkv.checkpoints.refusals import refuse_impostor, require_file, shown
from qkv.checkpoints.tensor import StoredTensor
from qkv.errors import CheckpointError

# Value types: the codes of `struct`, which numpy understands as well.
NUMBERS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d"}
BOOL, STRING, ARRAY = 7, 8, 9

TENSOR_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}

LONGEST_NAME = 65535  # bytes, by the format's definition
DEEPEST_ARRAY = 4
LARGEST_ALIGNMENT = 1 << 20
SMALLEST_KEY = 8 + 4 + 1  # bytes: an empty name, a type, a one-byte value
SMALLEST_TENSOR = 8 + 4 + 4 + 8  # bytes: an empty name, no dimensions, a type, an offset


@dataclass(frozen=True, slots=True, eq=False)
class Gguf:
    """What a GGUF file holds.

    `metadata` values are `int`, `float`, `bool` and `str`; arrays of numbers are numpy arrays of the
    stored type, arrays of strings `list[str]`, arrays of arrays `list`. Bytes in a string value that are
    not UTF-8 are kept as surrogates: `text.encode("utf-8", "surrogateescape")` gives them back.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_gguf(path: Path) -> Gguf:
    """Read a GGUF file of version 2 or 3, little-endian; tensor data stays mapped.

    Raises `SourceError` where there is no such file, and `CheckpointError` where it is damaged, hostile,
    of another version or byte order, one part of several, or another kind of file.
    """
    path = Path(path)
    require_file(path)
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            refuse_impostor(path, wanted="GGUF")
            raise CheckpointError(f"{path.name} is not a GGUF file: it does not begin with GGUF.")
        reader = _Reader(path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    version = reader.number("<I")
    if version and version & 0xFFFF == 0:
        reader.fail("is big-endian; only little-endian files are read")
    if version not in (2, 3):
        reader.fail(f"is GGUF version {version}; versions 2 and 3 are read")
    tensor_count = reader.count(SMALLEST_TENSOR, "tensors", spare=8)
    key_count = reader.count(SMALLEST_KEY, "keys")
    metadata = _read_metadata(reader, key_count)
    return Gguf(path, metadata, _read_tensors(reader, tensor_count, _alignment(reader, metadata)))


class _Reader:
    """A position in a mapped file, and the only code that moves it; every read is checked first."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path, self.buffer, self.size = path, buffer, len(buffer)
        self.position = 4
        self.at = ""  # what is being read, for the messages

    def fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.path.name}{self.at and ': ' + self.at} {problem}.")

    def need(self, size: int) -> None:
        left = self.size - self.position
        if size > left:
            self.fail(f"needs {size:,} more bytes and the file has {left:,}; it is damaged or incomplete")

    def number(self, code: str) -> Any:
        size = struct.calcsize(code)
        self.need(size)
        (value,) = struct.unpack_from(code, self.buffer, self.position)
        self.position += size
        return value

    def count(self, smallest: int, what: str, spare: int = 0) -> int:
        """A count of things of at least `smallest` bytes each, `spare` bytes being needed before them."""
        count = self.number("<Q")
        left = self.size - self.position - spare
        if count * smallest > left:
            self.fail(
                f"declares {count:,} {what}, and the {max(left, 0):,} bytes left cannot hold them; "
                "the file is damaged or incomplete"
            )
        return count

    def name(self) -> str:
        """A key or a tensor name: short and valid, since it will be printed and looked up."""
        length = self.number("<Q")
        if length > LONGEST_NAME:
            self.fail(f"has a name of {length:,} bytes; the format allows {LONGEST_NAME:,}")
        self.need(length)
        start, self.position = self.position, self.position + length
        try:
            return self.buffer[start : self.position].decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"has a name that is not UTF-8: {self.buffer[start : self.position][:40]!r}")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.strings(1)[0]
        if kind == ARRAY:
            return self.array(depth + 1)
        if kind == BOOL:
            return bool(self.booleans(1)[0])
        if kind not in NUMBERS:
            self.fail(f"has the value type {kind}, which is not known (0 to 12)")
        return self.number(NUMBERS[kind])

    def array(self, depth: int) -> Any:
        if depth > DEEPEST_ARRAY:
            self.fail(f"nests arrays more than {DEEPEST_ARRAY} deep")
        kind = self.number("<I")
        if kind == STRING:
            return self.strings(self.count(8, "strings"))
        if kind == ARRAY:
            return [self.array(depth + 1) for _ in range(self.count(12, "arrays"))]
        if kind == BOOL:
            return self.booleans(self.count(1, "values"))
        if kind not in NUMBERS:
            self.fail(f"has the value type {kind}, which is not known (0 to 12)")
        dtype = np.dtype(NUMBERS[kind])
        return self.numbers(dtype, self.count(dtype.itemsize, f"values of {dtype.itemsize} bytes"))

    def numbers(self, dtype: np.dtype, count: int) -> np.ndarray:
        self.need(count * dtype.itemsize)
        start, self.position = self.position, self.position + count * dtype.itemsize
        # A copy: the array is then aligned, and does not keep the file mapped.
        return np.frombuffer(self.buffer, dtype, count, start).copy()

    def booleans(self, count: int) -> np.ndarray:
        values = self.numbers(np.dtype(np.uint8), count)
        if (values > 1).any():
            self.fail(f"has a boolean of value {values.max()}; only 0 and 1 are defined")
        return values.astype(np.bool_)

    def strings(self, count: int) -> list[str]:
        """`count` strings, one loop without calls of our own: a vocabulary has half a million of them.

        Bytes that are not UTF-8 become surrogates instead of an error. llama.cpp treats strings as
        bytes, and vocabularies with tokens that are parts of a character exist; this way they load, and
        no two of them become equal.
        """
        buffer, position, size = self.buffer, self.position, self.size
        length_at = struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            start = position + 8
            if start > size:
                self.position = position
                self.need(8)
            position = start + length_at(buffer, position)[0]
            if position > size:
                self.fail(
                    f"has a string of {position - start:,} bytes, and the file ends after {size - start:,}; "
                    "it is damaged or incomplete"
                )
            found.append(str(buffer[start:position], "utf-8", "surrogateescape"))
        self.position = position
        return found


def _read_metadata(reader: _Reader, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        reader.at = f"key {index + 1} of {count}"
        key = reader.name()
        reader.at = f"key {shown(key)}"
        if key in metadata:
            reader.fail("is there twice")
        metadata[key] = reader.value(reader.number("<I"))
    reader.at = ""
    parts = metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        reader.fail(f"is one of {parts} parts of a model; join them first (llama-gguf-split --merge)")
    return metadata


def _alignment(reader: _Reader, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    sound = isinstance(alignment, int) and 8 <= alignment <= LARGEST_ALIGNMENT
    if not sound or alignment & (alignment - 1):
        reader.fail(
            f"has the alignment {shown(str(alignment))}; "
            f"it must be an integer, a power of two from 8 to {LARGEST_ALIGNMENT:,}"
        )
    return alignment


def _read_tensors(reader: _Reader, count: int, alignment: int) -> dict[str, StoredTensor]:
    entries: dict[str, tuple[tuple[int, ...], str, int]] = {}
    for index in range(count):
        reader.at = f"tensor {index + 1} of {count}"
        name = reader.name()
        reader.at = f"tensor {shown(name)}"
        if name in entries:
            reader.fail("is there twice")
        entries[name] = _read_entry(reader, alignment)
    start = -(-reader.position // alignment) * alignment
    data = np.frombuffer(reader.buffer, np.uint8)
    tensors: dict[str, StoredTensor] = {}
    taken, last = 0, ""
    for name, (shape, format, offset) in sorted(entries.items(), key=lambda entry: entry[1][2]):
        reader.at = f"tensor {shown(name)}"
        if offset < taken:
            reader.fail(f"overlaps tensor {shown(last)}")
        taken, last = offset + _size(shape, format), name
        if start + taken > reader.size:
            reader.fail(
                f"ends at byte {start + taken:,} and the file at byte {reader.size:,}; "
                "the download may be incomplete"
            )
        tensors[name] = StoredTensor(name, shape, format, data[start + offset : start + taken])
    return {name: tensors[name] for name in entries}


def _read_entry(reader: _Reader, alignment: int) -> tuple[tuple[int, ...], str, int]:
    dimensions = reader.number("<I")
    if dimensions > 4:
        reader.fail(f"has {dimensions:,} dimensions; at most 4 are allowed")
    shape = tuple(reader.number("<Q") for _ in range(dimensions))[::-1]
    if 0 in shape:
        reader.fail(f"has the shape {list(shape)}, with nothing in it")
    kind = reader.number("<I")
    if kind not in TENSOR_TYPES:
        reader.fail(f"has the type {kind}, which is not known")
    format = FORMATS[TENSOR_TYPES[kind]]
    if (shape[-1] if shape else 1) % format.block:
        reader.fail(
            f"has the shape {list(shape)}, whose rows are no multiple of {format.block} ({format.name})"
        )
    offset = reader.number("<Q")
    if offset % alignment:
        reader.fail(f"is at offset {offset:,}, which is no multiple of the alignment {alignment}")
    return shape, format.name, offset


def _size(shape: tuple[int, ...], format: str) -> int:
    size = FORMATS[format].size
    for length in shape:
        size *= length
    return size // FORMATS[format].block
