"""Small float formats that numpy has no type for -> float32.

Each function takes `(count, bytes)` uint8, one row a value, and returns `(count, 1)` float32. All values
of these formats are float32 values, so nothing is rounded.
"""

from collections.abc import Callable

import numpy as np


def bf16(values: np.ndarray) -> np.ndarray:
    """The upper half of a float32."""
    return (np.ascontiguousarray(values).view("<u2").astype(np.uint32) << 16).view(np.float32)


def float8(
    exponent: int, bias: int, infinite: bool, nan: tuple[int, ...]
) -> Callable[[np.ndarray], np.ndarray]:
    """A decoder for one-byte floats: sign, `exponent` bits, and the rest mantissa.

    `infinite` says that the largest exponent with a zero mantissa is infinity, as in IEEE 754; `nan`
    lists the codes that are not numbers. Definitions: Micikevicius et al. 2022 (E4M3, E5M2); the `FNUZ`
    kinds have neither infinities nor a negative zero, and a bias larger by one (Noune et al. 2022).
    """
    mantissa = 7 - exponent
    codes = np.arange(256)
    power = codes >> mantissa & (1 << exponent) - 1
    fraction = (codes & (1 << mantissa) - 1) / (1 << mantissa)
    size = np.where(power == 0, np.ldexp(fraction, 1 - bias), np.ldexp(1 + fraction, power - bias))
    if infinite:
        size[(power == (1 << exponent) - 1) & (fraction == 0)] = np.inf
    return _table(np.where(codes >= 128, -size, size), nan)


def powers_of_two() -> Callable[[np.ndarray], np.ndarray]:
    """E8M0, the scale of the microscaling formats (OCP MX 1.0, 5.4.1): `2 ** (code - 127)`; 255 is NaN."""
    return _table(np.ldexp(1.0, np.arange(256) - 127), nan=(255,))


def _table(values: np.ndarray, nan: tuple[int, ...]) -> Callable[[np.ndarray], np.ndarray]:
    values[list(nan)] = np.nan
    # E8M0's 255 would be 2^128 before it is made NaN, so the narrowing comes last.
    table = values.astype(np.float32)

    def decode(codes: np.ndarray) -> np.ndarray:
        return table[codes]

    return decode
