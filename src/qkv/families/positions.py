"""Rotary positions and their scalings from a configuration, whichever of the two spellings it uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from qkv.errors import ConfigError
from qkv.families.config import Config
from qkv.spec import Divided, DynamicNTK, Interpolation, Llama3, LongRope, Rotary, Scaling, Yarn


def rotary(config: Config, head_dim: int, context: int, theta: float = 10_000.0) -> Rotary:
    """From `rope_theta` and `rope_scaling`, or the newer `rope_parameters` that holds both."""
    key, source = _spelling(config)
    theta = config.positive("rope_theta", theta)
    fraction = config.positive("partial_rotary_factor", 1.0)
    if source is not None:
        theta = source.positive("rope_theta", theta)
        fraction = source.positive("partial_rotary_factor", fraction)
    dims = config.size("rotary_dim", None, most=head_dim) or int(head_dim * min(fraction, 2.0))
    if dims % 2 or not 2 <= dims <= head_dim:
        raise ConfigError(
            f"{config.where}: {dims:,} of the {head_dim:,} dimensions of a head would rotate; "
            "they turn in pairs, from 2 to all of them."
        )
    position = Rotary(
        theta=theta,
        dims=dims if dims != head_dim else None,
        pairs="interleaved" if config.take("rope_interleaved", bool, False) else "half",
        scaling=None if source is None else _scaling(source, config, key, context, dims),
    )
    _check(position, config.where if source is None else source.where, head_dim, context)
    return position


def _spelling(config: Config) -> tuple[str, Config | None]:
    """The object that holds the scaling, and its key."""
    keys = [key for key in ("rope_scaling", "rope_parameters") if config.peek(key)]
    if len(keys) == 2:
        raise ConfigError(
            f"{config.where} gives both rope_scaling and rope_parameters. "
            'Pass ignore=("rope_scaling",) or ignore=("rope_parameters",) to load with the other.'
        )
    config.discard("rope_scaling", "rope_parameters")
    return (keys[0], config.inside(keys[0])) if keys else ("", None)


class _Extent(NamedTuple):
    """Positions trained on, positions promised, dimensions that rotate."""

    original: int
    context: int
    dims: int


def _scaling(config: Config, outer: Config, key: str, context: int, dims: int) -> Scaling | None:
    """`rope_type` or its older name `type`; the original length falls back to the model's context."""
    name = "rope_type" if "rope_type" in config else "type"
    kind = config.take(name, str, "default")
    config.discard("type")
    if {"rope_type", "type"} & config.ignore:  # what belongs to the kind goes with it
        return None
    if kind not in SCALINGS:
        known = ", ".join(kind for kind in SCALINGS if kind not in ("default", "su", "divided"))
        # the newer spelling holds theta as well, which must not go with the scaling
        way_on = key if key == "rope_scaling" else name
        raise ConfigError(
            f'{config.where}.{name} "{kind}" is not known ({known}). '
            f'Pass ignore=("{way_on}",) to load without it.'
        )
    original = config.size("original_max_position_embeddings", None, most=MOST_POSITIONS)
    original = outer.size("original_max_position_embeddings", original, most=MOST_POSITIONS) or context
    scaling = SCALINGS[kind](config, _Extent(original, context, dims))
    config.finish()
    return scaling


def _default(config: Config, extent: _Extent) -> None:
    return None


def _linear(config: Config, extent: _Extent) -> Scaling:
    return Interpolation(config.positive("factor"))


def _dynamic(config: Config, extent: _Extent) -> Scaling:
    # the base follows the length the model was configured for, as deployed code has it
    return DynamicNTK(config.positive("factor"), extent.context)


def _yarn(config: Config, extent: _Extent) -> Scaling:
    return Yarn(
        factor=config.positive("factor"),
        original=extent.original,
        beta_fast=config.positive("beta_fast", 32.0),
        beta_slow=config.positive("beta_slow", 1.0),
        attention_factor=config.positive("attention_factor", None),
        mscale=config.take("mscale", float, None),
        mscale_all_dim=config.take("mscale_all_dim", float, None),
        truncate=config.take("truncate", bool, True),
    )


def _llama3(config: Config, extent: _Extent) -> Scaling:
    low, high = config.positive("low_freq_factor"), config.positive("high_freq_factor")
    if low > high:
        raise ConfigError(f"{config.at('low_freq_factor')} {low} is above high_freq_factor {high}.")
    return Llama3(config.positive("factor"), low, high, extent.original)


def _longrope(config: Config, extent: _Extent) -> Scaling:
    return LongRope(
        short=_divisors(config, "short_factor", extent.dims // 2),
        long=_divisors(config, "long_factor", extent.dims // 2),
        original=extent.original,
        factor=config.positive("factor", extent.context / extent.original),
        attention_factor=config.positive("attention_factor", None),
    )


def _divided(config: Config, extent: _Extent) -> Scaling:
    return Divided(_divisors(config, "divisors", extent.dims // 2))


def _divisors(config: Config, key: str, pairs: int) -> tuple[float, ...]:
    values = config.take(key, list)
    if len(values) != pairs:
        raise ConfigError(f"{config.at(key)} has {len(values):,} factors; it must have {pairs:,}.")
    listed = Config({str(i): value for i, value in enumerate(values)}, config.at(key))
    return tuple(listed.positive(str(i)) for i in range(pairs))


MOST_POSITIONS = 1 << 40
SCALINGS: dict[str, Callable[[Config, _Extent], Scaling | None]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "su": _longrope,
    "divided": _divided,
}


def _check(position: Rotary, where: str, head_dim: int, context: int) -> None:
    """Numbers that are sound one by one may still divide by nothing together."""
    try:
        with np.errstate(all="ignore"):
            sound = all(
                bool(np.isfinite(frequencies).all()) and np.isfinite(factor)
                for frequencies, factor in (position.frequencies(head_dim, n) for n in (1, context))
            )
    except (ArithmeticError, ValueError):
        sound = False
    if not sound:
        raise ConfigError(f"{where}: its numbers give rotary positions no finite frequency.")
