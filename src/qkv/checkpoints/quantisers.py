"""float32 -> GGUF's block formats, one function a format: what `blocks` decodes, the other way.

Each function takes `(count, weights)` float32, one row a block, and returns `(count, bytes)` uint8.

The formats of 32 weights follow the rule of ggml's reference, which is a definition rather than a
search: the block's extremes fix the scale (and the minimum), and every weight goes to the nearest
step. Their bytes are equal to those that other converters write.

The `K` formats leave a choice: a run's scale and minimum may cut off its extremes where that serves
the rest. They are searched for. Each of a range of steps gives whole numbers, these give the scale
and minimum of least squared error in closed form, and the best of all is kept; the scales are then
rounded to 6 or 8 bits, and the block's common factors fitted once more to what came of that.
"""

from collections.abc import Callable

import numpy as np

from qkv.checkpoints.formats import FORMATS
from qkv.checkpoints.refusals import shown
from qkv.checkpoints.tensor import SLAB, StoredTensor
from qkv.errors import CheckpointError, RequestError

Array = np.ndarray
Encoder = Callable[[Array], Array]

# how many steps the range of a run is divided in, about the number that the format has
STEPS = np.linspace(-1.2, 0.8, 21, dtype=np.float32)
REFITS = 3


def quantise(name: str, values: Array, format: str) -> StoredTensor:
    """A tensor in a format: plain (F32, F16, BF16) or one of blocks, along the last axis.

    Raises `CheckpointError`, naming the tensor, for values that are not finite or that the format
    cannot hold, and for rows that are no multiple of its blocks; `RequestError` for a format that is
    not written.
    """
    if format not in ENCODERS:
        raise RequestError(f"{shown(format)} cannot be written; these can: {', '.join(ENCODERS)}.")
    kind = FORMATS[format]
    if (values.shape[-1] if values.ndim else 1) % kind.block:
        raise CheckpointError(
            f"tensor {shown(name)} has the shape {list(values.shape)}, whose rows are no multiple of "
            f"{kind.block} ({format})."
        )
    blocks = np.ascontiguousarray(values).reshape(-1, kind.block)
    data = np.empty((len(blocks), kind.size), np.uint8)
    step = SLAB // kind.block
    for start in range(0, len(blocks), step):
        data[start : start + step] = _encoded(name, blocks[start : start + step], format)
    return StoredTensor(name, values.shape, format, data.reshape(-1))


def _encoded(name: str, blocks: Array, format: str) -> Array:
    if not np.isfinite(blocks).all():
        raise CheckpointError(f"tensor {shown(name)} holds infinity or NaN, which {format} cannot hold.")
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        floats = blocks.astype(np.float32, copy=False)
        data = ENCODERS[format](floats)
        sound = np.isfinite(floats).all() and _finite(data, format)
    if not sound:
        raise CheckpointError(
            f"tensor {shown(name)} has values up to {float(np.abs(blocks).max()):.3g}, "
            f"beyond what {format} can hold."
        )
    return data


def _finite(data: Array, format: str) -> bool:
    """Whether blocks decode to numbers: what is too large shows in a scale that is infinite."""
    if format not in SCALES:
        stored = StoredTensor("", (len(data),), format, np.ascontiguousarray(data).reshape(-1))
        return bool(np.isfinite(stored.decode()).all())
    return all(
        bool(np.isfinite(np.ascontiguousarray(data[:, at : at + 2]).view("<f2")).all())
        for at in SCALES[format]
    )


def squared_error(values: Array, stored: StoredTensor) -> tuple[float, float]:
    """The sum of squared differences between the two, and of the squared values.

    The root of their quotient is the relative error.
    """
    flat, block = np.ascontiguousarray(values).reshape(-1), FORMATS[stored.format]
    error = size = 0.0
    for start in range(0, len(flat), SLAB):
        piece = flat[start : start + SLAB].astype(np.float64)
        first = start // block.block * block.size
        data = stored.data[first : first + len(piece) // block.block * block.size]
        decoded = StoredTensor(stored.name, piece.shape, stored.format, data).decode()
        error += float(np.square(piece - decoded).sum())
        size += float(np.square(piece).sum())
    return error, size


def bf16(values: Array) -> Array:
    """To the nearest upper half of a float32, to the even one of two."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").view(np.uint8)


def q4_0(x: Array) -> Array:
    scale, q = _around_zero(x, 8)
    return _joined(_half(scale), _nibbles(q))


def q4_1(x: Array) -> Array:
    scale, minimum, q = _between(x, 15)
    return _joined(_half(scale), _half(minimum), _nibbles(q))


def q5_0(x: Array) -> Array:
    scale, q = _around_zero(x, 16)
    return _joined(_half(scale), _fifth_bits(q), _nibbles(q & 15))


def q5_1(x: Array) -> Array:
    scale, minimum, q = _between(x, 31)
    return _joined(_half(scale), _half(minimum), _fifth_bits(q), _nibbles(q & 15))


def q8_0(x: Array) -> Array:
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    steps = x * _inverse(scale)
    whole = np.trunc(steps)
    q = whole + np.trunc(2 * (steps - whole))  # halves away from zero
    return _joined(_half(scale), q.astype(np.int8).view(np.uint8))


def q4_k(x: Array) -> Array:
    head, q = _scales_and_minima(x, 15)
    return _joined(head, _nibbles_by_32(q))


def q5_k(x: Array) -> Array:
    head, q = _scales_and_minima(x, 31)
    fifth = np.bitwise_or.reduce((q >> 4).reshape(-1, 8, 32) << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    return _joined(head, fifth, _nibbles_by_32(q & 15))


def q6_k(x: Array) -> Array:
    runs = x.reshape(-1, 16, 16)
    scale = _best_scale(runs, 32)
    largest = np.take_along_axis(scale, np.abs(scale).argmax(axis=1, keepdims=True), axis=1)
    d = _covering(largest / np.float32(-128))
    scales = np.rint(scale * _inverse(d)).clip(-128, 127)
    q = _nearest(runs, d * scales)
    best = _error(runs, d * scales, q)
    for _ in range(REFITS):  # the common factor again, for the whole numbers found
        steps = scales[:, :, None] * q
        fitted = _rounded(
            _dot(runs, steps).sum(axis=1, keepdims=True)
            * _inverse(_dot(steps, steps).sum(axis=1, keepdims=True))
        )
        again = _nearest(runs, fitted * scales)
        error = _error(runs, fitted * scales, again)
        better = error < best
        d = np.where(better[:, None], fitted, d)
        q = np.where(better[:, None, None], again, q)
        best = np.minimum(best, error)
    whole = (q + 32).astype(np.uint8).reshape(-1, 256)
    low, high = whole.reshape(-1, 2, 2, 64) & 15, whole.reshape(-1, 2, 4, 32) >> 4
    return _joined(
        (low[:, :, 0] | low[:, :, 1] << 4).reshape(-1, 128),
        (high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6).reshape(-1, 64),
        scales.astype(np.int8).view(np.uint8),
        _half(d),
    )


def _around_zero(x: Array, levels: int) -> tuple[Array, Array]:
    """Scale and steps from 0 to 2 * levels - 1, zero being at `levels`: the farthest weight is at 0."""
    farthest = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    scale = farthest / np.float32(-levels)
    q = np.trunc(x * _inverse(scale) + np.float32(levels + 0.5)).clip(0, 2 * levels - 1)
    return scale, q.astype(np.uint8)


def _between(x: Array, most: int) -> tuple[Array, Array, Array]:
    """Scale, minimum, and steps from 0 to `most`."""
    minimum = x.min(axis=1, keepdims=True)
    scale = (x.max(axis=1, keepdims=True) - minimum) / np.float32(most)
    q = np.trunc((x - minimum) * _inverse(scale) + np.float32(0.5)).clip(0, most)
    return scale, minimum, q.astype(np.uint8)


def _scales_and_minima(x: Array, most: int) -> tuple[Array, Array]:
    """The sixteen bytes that Q4_K and Q5_K begin with, and the steps, `(count, 256)`."""
    runs = x.reshape(-1, 8, 32)
    scale, minimum = _best_scale_and_minimum(runs, most)
    d = _covering(scale.max(axis=1, keepdims=True) / np.float32(63))
    dmin = _covering(minimum.max(axis=1, keepdims=True) / np.float32(63))
    scales = np.rint(scale * _inverse(d)).clip(0, 63)
    minima = np.rint(minimum * _inverse(dmin)).clip(0, 63)
    q = _steps(runs, d * scales, dmin * minima, most)
    best = _error(runs, d * scales, q, dmin * minima)
    for _ in range(REFITS):  # both common factors again, for the whole numbers found
        fit_d, fit_dmin = _fitted(runs, scales, minima, q)
        again = _steps(runs, fit_d * scales, fit_dmin * minima, most)
        error = _error(runs, fit_d * scales, again, fit_dmin * minima)
        better = error < best
        d, dmin = np.where(better[:, None], fit_d, d), np.where(better[:, None], fit_dmin, dmin)
        q = np.where(better[:, None, None], again, q)
        best = np.minimum(best, error)
    packed = _six_bits(scales.astype(np.uint8), minima.astype(np.uint8))
    return _joined(_half(d), _half(dmin), packed), q.astype(np.uint8).reshape(-1, 256)


def _fitted(runs: Array, scales: Array, minima: Array, q: Array) -> tuple[Array, Array]:
    """d and dmin of least squared error for d * scale * q - dmin * minimum, rounded; neither below 0."""
    up, down = scales[:, :, None] * q, np.broadcast_to(minima[:, :, None], q.shape)

    def over(a: Array, b: Array) -> Array:
        return _dot(a, b).sum(axis=1, keepdims=True).astype(np.float64)

    uu, ud, dd, xu, xd = over(up, up), over(up, down), over(down, down), over(runs, up), over(runs, down)
    determinant = uu * dd - ud * ud
    both = determinant > 1e-9 * uu * dd
    inverse = np.where(both, 1 / np.where(both, determinant, 1), 0)
    d, dmin = (xu * dd - xd * ud) * inverse, (xu * ud - xd * uu) * inverse
    # where there are no minima, or nothing but them, each is fitted by itself
    d = np.where(both & (dmin >= 0), d, xu * _inverse(uu))
    dmin = np.where(both, dmin, 0)
    return _rounded(np.maximum(d, 0)), _rounded(np.maximum(dmin, 0))


def _best_scale_and_minimum(runs: Array, most: int) -> tuple[Array, Array]:
    """For each run the two that leave the least squared error of scale * q - minimum; minimum >= 0.

    `(count, runs, weights)` -> twice `(count, runs)`.
    """
    low = np.minimum(runs.min(axis=2), 0)
    width = runs.max(axis=2) - low
    scale, minimum = width / np.float32(most), -low
    best = _error_of_each(runs, scale, _steps(runs, scale, minimum, most), minimum)
    weights, total = np.float32(runs.shape[2]), runs.sum(axis=2)
    for step in STEPS:
        q = np.rint((runs - low[:, :, None]) * ((most + step) * _inverse(width))[:, :, None]).clip(0, most)
        sum_q, sum_qq, sum_xq = q.sum(axis=2), _dot(q, q), _dot(runs, q)
        determinant = weights * sum_qq - sum_q * sum_q
        inverse = _inverse(determinant)
        tried = (weights * sum_xq - total * sum_q) * inverse
        offset = (sum_q * sum_xq - sum_qq * total) * inverse
        # a minimum below 0 cannot be stored; the best scale without one can
        tried = np.where(offset < 0, sum_xq * _inverse(sum_qq), tried)
        offset = np.maximum(offset, 0)
        error = _error_of_each(runs, tried, _steps(runs, tried, offset, most), offset)
        better = (error < best) & (tried > 0)
        scale, minimum = np.where(better, tried, scale), np.where(better, offset, minimum)
        best = np.where(better, error, best)
    return scale, minimum


def _best_scale(runs: Array, levels: int) -> Array:
    """For each run the scale of least squared error of scale * q, q from -levels to levels - 1."""
    farthest = np.take_along_axis(runs, np.abs(runs).argmax(axis=2, keepdims=True), axis=2)
    scale = farthest[:, :, 0] / np.float32(-levels)
    best = _error_of_each(runs, scale, _nearest(runs, scale))
    for step in STEPS:
        q = np.rint(runs * ((-levels - step) * _inverse(farthest))).clip(-levels, levels - 1)
        tried = _dot(runs, q) * _inverse(_dot(q, q))
        error = _error_of_each(runs, tried, _nearest(runs, tried))
        better = error < best
        scale, best = np.where(better, tried, scale), np.where(better, error, best)
    return scale


def _steps(runs: Array, scale: Array, minimum: Array, most: int) -> Array:
    return np.rint((runs + minimum[:, :, None]) * _inverse(scale)[:, :, None]).clip(0, most)


def _nearest(runs: Array, scale: Array) -> Array:
    return np.rint(runs * _inverse(scale)[:, :, None]).clip(-32, 31)


def _error_of_each(runs: Array, scale: Array, q: Array, minimum: Array | None = None) -> Array:
    """The squared error of each run, `(count, runs)`."""
    found = scale[:, :, None] * q
    if minimum is not None:
        found -= minimum[:, :, None]
    found -= runs
    return _dot(found, found)


def _error(runs: Array, scale: Array, q: Array, minimum: Array | None = None) -> Array:
    return _error_of_each(runs, scale, q, minimum).sum(axis=1)


def _dot(a: Array, b: Array) -> Array:
    return np.einsum("nrw,nrw->nr", a, b)


def _inverse(values: Array) -> Array:
    """1 / value, 0 of 0: a block of zeros has the scale 0 and all its weights at it."""
    return np.where(values == 0, values, 1 / np.where(values == 0, 1, values))


def _rounded(values: Array) -> Array:
    """As float16 holds them, to go on with what will be decoded."""
    return values.astype(np.float16).astype(np.float32)


def _covering(values: Array) -> Array:
    """Rounded, but not down by more than its multiples can make up for, as the smallest float16 would be."""
    near = values.astype(np.float16)
    short = np.abs(near.astype(np.float32)) < np.abs(values) * np.float32(1 - 2**-10)
    away = np.nextafter(near, np.copysign(np.float16(np.inf), values.astype(np.float16)))
    return np.where(short, away, near).astype(np.float32)


def _half(values: Array) -> Array:
    """`(count, 1)` as the two bytes of a float16."""
    return values.astype("<f2").view(np.uint8)


def _nibbles(q: Array) -> Array:
    """The first half of the weights in the low halves of bytes, the second in the high ones."""
    half = q.shape[1] // 2
    return q[:, :half] | q[:, half:] << 4


def _nibbles_by_32(q: Array) -> Array:
    """The same within every 64 weights."""
    pairs = q.reshape(-1, 4, 2, 32)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)


def _fifth_bits(q: Array) -> Array:
    return np.packbits(q >> 4, axis=1, bitorder="little")


def _six_bits(scales: Array, minima: Array) -> Array:
    """Eight 6-bit scales and minima in twelve bytes; `blocks` says where each bit goes."""
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = minima[:, :4] | minima[:, 4:] >> 4 << 6
    third = scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4
    return _joined(first, second, third)


def _joined(*parts: Array) -> Array:
    return np.concatenate(parts, axis=1)


ENCODERS: dict[str, Encoder] = {
    "F32": lambda x: x.astype("<f4", copy=False).view(np.uint8),
    "F16": _half,
    "BF16": bf16,
    "Q8_0": q8_0,
    "Q6_K": q6_k,
    "Q5_K": q5_k,
    "Q5_1": q5_1,
    "Q5_0": q5_0,
    "Q4_K": q4_k,
    "Q4_1": q4_1,
    "Q4_0": q4_0,
}
# where in a block its float16 factors stand
SCALES: dict[str, tuple[int, ...]] = {
    "Q8_0": (0,),
    "Q6_K": (208,),
    "Q5_K": (0, 2),
    "Q5_1": (0, 2),
    "Q5_0": (0,),
    "Q4_K": (0, 2),
    "Q4_1": (0, 2),
    "Q4_0": (0,),
}
