"""GGUF's quantised blocks -> float32, one function a format.

Each function takes `(count, bytes)` uint8, one row a block, and returns `(count, weights)` float32.
The layouts follow the block structures of ggml (`ggml-common.h`) and the products are taken in the
order its C code takes them, so the values are equal to ggml's bit by bit.

A block of 32 weights has one float16 scale `d` (and for the `_1` formats a minimum `m`):

    Q4_0  d, 16 bytes of two 4-bit numbers          d * (q - 8)
    Q4_1  d, m, 16 bytes                            d * q + m
    Q5_0  d, 32 fifth bits, 16 bytes                d * (q - 16)
    Q5_1  d, m, 32 fifth bits, 16 bytes             d * q + m
    Q8_0  d, 32 int8                                d * q

A `K` block of 256 weights has small integer scales for its sub-blocks, themselves scaled by `d`:

    Q2_K  16 x (4-bit scale, 4-bit minimum), 64 bytes, d, dmin     d * scale * q - dmin * minimum
    Q3_K  256 third bits, 64 bytes, 16 6-bit scales, d             d * (scale - 32) * (q - 4)
    Q4_K  d, dmin, 8 x (6-bit scale, minimum), 128 bytes           d * scale * q - dmin * minimum
    Q5_K  as Q4_K, with 256 fifth bits before the 128 bytes        d * scale * q - dmin * minimum
    Q6_K  128 bytes of 4 bits, 64 of 2, 16 int8 scales, d          d * scale * (q - 32)
"""

import numpy as np

Array = np.ndarray


def q4_0(blocks: Array) -> Array:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def q4_1(blocks: Array) -> Array:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def q5_0(blocks: Array) -> Array:
    q = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (q.astype(np.float32) - 16)


def q5_1(blocks: Array) -> Array:
    q = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * q.astype(np.float32) + _half(blocks, 2)


def q8_0(blocks: Array) -> Array:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def q2_k(blocks: Array) -> Array:
    scale = _half(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32)
    minimum = _half(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32)
    return _scaled(_pairs(blocks[:, 16:80]), scale) - _spread(minimum)


def q3_k(blocks: Array) -> Array:
    packed = blocks[:, 96:108]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high = _bits(packed[:, 8:], width=2).reshape(-1, 16)
    scale = _half(blocks, 108) * ((low | high << 4).astype(np.float32) - 32)
    # A third bit that is set means "do not subtract 4", which is the same as adding it as bit 2.
    q = _pairs(blocks[:, 32:96]) | _bits(blocks[:, :32], width=1).reshape(-1, 256) << 2
    return _scaled(q.astype(np.float32) - 4, scale)


def q4_k(blocks: Array) -> Array:
    scale, minimum = _six_bit_scales(blocks)
    return _scaled(_nibbles_by_32(blocks[:, 16:]), scale) - _spread(minimum)


def q5_k(blocks: Array) -> Array:
    scale, minimum = _six_bit_scales(blocks)
    q = _nibbles_by_32(blocks[:, 48:]) | _bits(blocks[:, 16:48], width=1).reshape(-1, 256) << 4
    return _scaled(q, scale) - _spread(minimum)


def q6_k(blocks: Array) -> Array:
    # Each 64 bytes hold the low four bits of 128 weights: 64 low nibbles, then 64 high ones.
    low = _bits(blocks[:, :128].reshape(-1, 64), width=4).reshape(-1, 256)
    q = low | _pairs(blocks[:, 128:192]) << 4
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _scaled(q.astype(np.float32) - 32, scale)


def _half(blocks: Array, at: int) -> Array:
    """The float16 at byte `at` of every block, as `(count, 1)` float32."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Array) -> Array:
    """All low halves of the bytes, then all high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _nibbles_by_32(packed: Array) -> Array:
    """The same within every 32 bytes: 32 low halves, 32 high halves, the next 32 bytes."""
    return _bits(packed.reshape(-1, 32), width=4).reshape(-1, 256)


def _pairs(packed: Array) -> Array:
    """Two bits a weight: each 32 bytes hold four runs of 32 weights, the lowest bits first."""
    return _bits(packed.reshape(-1, 32), width=2).reshape(-1, 256)


def _bits(packed: Array, width: int) -> Array:
    """`(count, n)` bytes -> `(count, 8 // width, n)`: field 0 of every byte, then field 1, and so on."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[None, :, None]
    return packed[:, None, :] >> shifts & np.uint8((1 << width) - 1)


def _fifth_bits(packed: Array) -> Array:
    """Four bytes, read as a 32-bit mask: bit j belongs to weight j; returned in place, as 0 or 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def _six_bit_scales(blocks: Array) -> tuple[Array, Array]:
    """The scales and minima of Q4_K and Q5_K, `(count, 8)` float32 each, multiplied by `d` and `dmin`.

    Twelve bytes: four 6-bit scales and four 6-bit minima in the low bits of the first eight; the other
    four of each have their low nibbles in the last four bytes and their top bits in the spare two bits
    of the first eight.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minimum = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return _half(blocks, 0) * scale.astype(np.float32), _half(blocks, 2) * minimum.astype(np.float32)


def _scaled(q: Array, scale: Array) -> Array:
    """Each run of equal length in `q` times its own scale: `(count, 256)` and `(count, runs)`."""
    runs = q.reshape(*scale.shape, -1).astype(np.float32)
    runs *= scale[:, :, None]
    return runs.reshape(-1, 256)


def _spread(values: Array) -> Array:
    """`(count, runs)` -> `(count, 256)`, each value repeated over its run."""
    return np.repeat(values, 256 // values.shape[1], axis=1)
