"""One tensor as a file holds it."""

import math
from dataclasses import dataclass, field

import numpy as np

from qkv.checkpoints.formats import FORMATS, PLAIN
from qkv.checkpoints.refusals import shown
from qkv.errors import CheckpointError, UnsupportedError

# Decoding works on this many values at a time: the intermediate arrays then stay in the processor's
# cache, and the peak is the result and a few megabytes however large the tensor is.
SLAB = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A named tensor in its stored form, usually a window on a memory-mapped file.

    `shape` is row-major, the outermost axis first (GGUF writes the reverse). `format` is a name in
    `FORMATS`. `data` is one-dimensional uint8: exactly this tensor's bytes, little-endian.

    Raises `CheckpointError` where the bytes do not fit the shape and format.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    data: np.ndarray = field(repr=False)

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise CheckpointError(
                f"tensor {shown(self.name)} has the format {shown(self.format)}, which is not known."
            )
        # numpy refuses shapes past these limits even where a zero among them makes the tensor empty.
        if len(self.shape) > 32 or math.prod(max(size, 1) for size in self.shape) >= 1 << 60:
            raise CheckpointError(f"tensor {shown(self.name)} has a shape that no array can have.")
        format = FORMATS[self.format]
        if self.elements % format.block:
            raise CheckpointError(
                f"tensor {shown(self.name)} has {self.elements:,} values, which is no multiple of the "
                f"{format.block} in a block of {self.format}."
            )
        need = self.elements // format.block * format.size
        if self.data.nbytes != need:
            raise CheckpointError(
                f"tensor {shown(self.name)} of shape {list(self.shape)} needs {need:,} bytes "
                f"in {self.format} and has {self.data.nbytes:,}."
            )

    @classmethod
    def from_array(cls, name: str, array: np.ndarray) -> "StoredTensor":
        """An array of a type that numpy has, without a copy where it is already contiguous."""
        little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
        if little.dtype not in PLAIN:
            raise CheckpointError(
                f"tensor {shown(name)} has the numpy type {array.dtype}, which no file format here stores."
            )
        return cls(name, array.shape, PLAIN[little.dtype].name, little.reshape(-1).view(np.uint8))

    @property
    def elements(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes the stored form takes."""
        return self.data.nbytes

    def decode(self) -> np.ndarray:
        """The values, in `shape`.

        Floats of 16, 32 and 64 bits, integers and booleans come in their own dtype and, where the
        bytes are aligned, as a read-only view on the file. bfloat16, float8 and the block formats come
        as float32, exactly.

        Raises `UnsupportedError` for a format that can be sized but not decoded.
        """
        format = FORMATS[self.format]
        if format.dtype == np.bool_:
            # Not a view: numpy's behaviour on a boolean byte other than 0 and 1 is undefined.
            return (self.data != 0).reshape(self.shape)
        if format.dtype is not None:
            values = self.data.view(format.dtype).reshape(self.shape)
            # safetensors does not promise alignment, and most of what reads an array does expect it.
            return values if values.flags.aligned else values.copy()
        if format.decode is None:
            known = ", ".join(each.name for each in FORMATS.values() if each.decode and each.block > 1)
            raise UnsupportedError(
                f"tensor {shown(self.name)} is stored as {self.format}, which can be sized but not decoded; "
                f"of the block formats these can: {known}."
            )
        blocks = self.data.reshape(-1, format.size)
        values = np.empty((len(blocks), format.block), np.float32)
        step = SLAB // format.block
        # A damaged scale may be infinite; infinity times zero is then NaN, and the caller sees it as such.
        with np.errstate(invalid="ignore"):
            for start in range(0, len(blocks), step):
                values[start : start + step] = format.decode(blocks[start : start + step])
        return values.reshape(self.shape)
