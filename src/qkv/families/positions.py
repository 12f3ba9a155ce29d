"""Rotary positions and their scalings from a configuration, whichever of the two spellings it uses."""

from __future__ import annotations

from qkv.errors import ConfigError
from qkv.families.config import Config
from qkv.spec import DynamicNTK, Interpolation, Llama3, LongRope, Rotary, Scaling, Yarn

KNOWN = "linear, dynamic, yarn, llama3, longrope"


def rotary(config: Config, head_dim: int, context: int, theta: float = 10_000.0) -> Rotary:
    """From `rope_theta` and `rope_scaling`, or the newer `rope_parameters` that holds both."""
    inside = config.inside("rope_parameters")
    scaling = config.inside("rope_scaling")
    source = inside if inside is not None else scaling
    outer_theta = config.take("rope_theta", float, theta)
    fraction = config.take("partial_rotary_factor", float, 1.0)
    interleaved = config.take("rope_interleaved", bool, False)
    if source is not None:
        outer_theta = source.take("rope_theta", float, outer_theta)
        fraction = source.take("partial_rotary_factor", float, fraction)
    dims = int(head_dim * fraction)
    return Rotary(
        theta=outer_theta,
        dims=dims if dims != head_dim else None,
        pairs="interleaved" if interleaved else "half",
        scaling=None if source is None else _scaling(source, config, context, dims),
    )


def _scaling(config: Config, outer: Config, context: int, dims: int) -> Scaling | None:
    """`rope_type` or its older name `type`; the original length falls back to the model's context."""
    kind = config.take("rope_type", str, None)
    kind = config.take("type", str, kind or "default") if kind is None else kind
    config.discard("type")
    original = config.take("original_max_position_embeddings", int, None)
    original = outer.take("original_max_position_embeddings", int, original) or context
    scaling: Scaling | None
    match kind:
        case "default":
            scaling = None
        case "linear":
            scaling = Interpolation(config.take("factor", float))
        case "dynamic":
            # the base follows the length the model was configured for, as deployed code has it
            scaling = DynamicNTK(config.take("factor", float), context)
        case "yarn":
            scaling = Yarn(
                factor=config.take("factor", float),
                original=original,
                beta_fast=config.take("beta_fast", float, 32.0),
                beta_slow=config.take("beta_slow", float, 1.0),
                attention_factor=config.take("attention_factor", float, None),
                mscale=config.take("mscale", float, None),
                mscale_all_dim=config.take("mscale_all_dim", float, None),
                truncate=config.take("truncate", bool, True),
            )
        case "llama3":
            scaling = Llama3(
                factor=config.take("factor", float),
                low=config.take("low_freq_factor", float),
                high=config.take("high_freq_factor", float),
                original=original,
            )
        case "longrope" | "su":
            scaling = _longrope(config, original, context, dims)
        case _:
            raise ConfigError(
                f'{config.where}.type "{kind}" is not known ({KNOWN}). '
                f'Pass ignore=("{config.where.split(": ")[-1]}",) to load without it.'
            )
    config.finish()
    return scaling


def _longrope(config: Config, original: int, context: int, dims: int) -> LongRope:
    lists = []
    for key in ("short_factor", "long_factor"):
        factors = config.take(key, list)
        if len(factors) != dims // 2:
            raise ConfigError(f"{config.where}: {key} has {len(factors)} factors; it must have {dims // 2}.")
        lists.append(tuple(float(factor) for factor in factors))
    return LongRope(
        short=lists[0],
        long=lists[1],
        original=original,
        factor=config.take("factor", float, context / original),
        attention_factor=config.take("attention_factor", float, None),
    )
