"""Every format a tensor can be stored in: one row each.

A further format is one function (in `blocks` or `floats`) and one row here. Names are those of
safetensors and of GGUF, which agree where they overlap.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from qkv.checkpoints import blocks, floats

Decoder = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class Format:
    """How values lie in bytes: `block` values in `size` bytes.

    Where numpy has the type, `dtype` is it. Otherwise `decode` turns `(count, size)` uint8 into
    `(count, block)` float32. A format with neither can be sized and listed, not decoded.
    """

    name: str
    block: int
    size: int
    dtype: np.dtype | None = None
    decode: Decoder | None = None


def _plain(name: str, dtype: str) -> Format:
    return Format(name, 1, np.dtype(dtype).itemsize, dtype=np.dtype(dtype))


FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        _plain("F64", "<f8"),
        _plain("F32", "<f4"),
        _plain("F16", "<f2"),
        _plain("C64", "<c8"),
        _plain("I64", "<i8"),
        _plain("I32", "<i4"),
        _plain("I16", "<i2"),
        _plain("I8", "i1"),
        _plain("U64", "<u8"),
        _plain("U32", "<u4"),
        _plain("U16", "<u2"),
        _plain("U8", "u1"),
        _plain("BOOL", "?"),
        Format("BF16", 1, 2, decode=floats.bf16),
        Format("F8_E4M3", 1, 1, decode=floats.float8(4, bias=7, infinite=False, nan=(0x7F, 0xFF))),
        Format(
            "F8_E5M2",
            1,
            1,
            decode=floats.float8(5, bias=15, infinite=True, nan=(0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF)),
        ),
        Format("F8_E4M3FNUZ", 1, 1, decode=floats.float8(4, bias=8, infinite=False, nan=(0x80,))),
        Format("F8_E5M2FNUZ", 1, 1, decode=floats.float8(5, bias=16, infinite=False, nan=(0x80,))),
        Format("F8_E8M0", 1, 1, decode=floats.powers_of_two()),
        Format("F6_E2M3", 4, 3),
        Format("F6_E3M2", 4, 3),
        Format("F4", 2, 1),
        Format("Q4_0", 32, 18, decode=blocks.q4_0),
        Format("Q4_1", 32, 20, decode=blocks.q4_1),
        Format("Q5_0", 32, 22, decode=blocks.q5_0),
        Format("Q5_1", 32, 24, decode=blocks.q5_1),
        Format("Q8_0", 32, 34, decode=blocks.q8_0),
        Format("Q2_K", 256, 84, decode=blocks.q2_k),
        Format("Q3_K", 256, 110, decode=blocks.q3_k),
        Format("Q4_K", 256, 144, decode=blocks.q4_k),
        Format("Q5_K", 256, 176, decode=blocks.q5_k),
        Format("Q6_K", 256, 210, decode=blocks.q6_k),
        Format("IQ1_S", 256, 50),
        Format("IQ1_M", 256, 56),
        Format("IQ2_XXS", 256, 66),
        Format("IQ2_XS", 256, 74),
        Format("IQ2_S", 256, 82),
        Format("IQ3_XXS", 256, 98),
        Format("IQ3_S", 256, 110),
        Format("IQ4_NL", 32, 18),
        Format("IQ4_XS", 256, 136),
        Format("TQ1_0", 256, 54),
        Format("TQ2_0", 256, 66),
        Format("MXFP4", 32, 17),
    )
}

PLAIN = {format.dtype: format for format in FORMATS.values() if format.dtype is not None}
