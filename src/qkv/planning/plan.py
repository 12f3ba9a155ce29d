"""The plan: what a model needs for so many sequences of a length, what fits, and how fast it would be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from qkv.errors import RequestError
from qkv.memory import free_memory
from qkv.planning import cache, timing
from qkv.planning.profile import Profile, device as known_device
from qkv.planning.result import MOST_CONTEXT, MOST_SEQUENCES, Asked, Plan
from qkv.planning.sizes import Part
from qkv.planning.source import Source, read
from qkv.planning.training import training
from qkv.planning.weights import Stored, stored, weights, weights_of_file
from qkv.planning.workspace import framework, workspace
from qkv.spec import Model

USABLE = 0.92  # of an accelerator's memory: the rest is fragmented, or the driver's


def plan(
    source: str | Path | Model,
    *,
    memory: int | None = None,
    context: int | None = None,
    concurrency: int = 1,
    weights: str | None = None,
    kv: str = "bf16",
    prefix: int = 0,
    device: str | None = None,
    tensor_parallel: int = 1,
    profile: Profile | None = None,
    reads: int = 0,
    batch: int | None = None,
) -> Plan:
    """What running a model takes, before anything is bought or loaded. No weights are read.

    `source` is as for `inspect`, or a description. `memory` are the bytes there are on each device;
    None is what this machine has free, or a named `device`'s own. `context` None is the model's;
    `weights` None as its files store them, else a format ("q4_k"); `kv` is how keys and values are
    kept: "bf16", "f32", "int8" or "fp8". `concurrency` sequences begin with `prefix` tokens that are
    alike. `tensor_parallel` devices hold a share of matrices and heads each. Times come from
    `profile`, else from the device's figures; None without either. `reads` are the rows an encoder
    reads. `batch` sequences of `context` tokens in training add what that takes.

    Raises RequestError for what cannot be asked for, UnsupportedError for a source that could not be
    described.
    """
    found = read(source)
    named = known_device(device) if device is not None else None
    at = profile or named
    have = memory
    if have is None:
        have = round(USABLE * named.memory) if named and named.memory else free_memory()
    how = stored(weights) if weights is not None else found.how
    kept = found if weights is None else Source(found.name, found.model, found.context, how)
    length = context or found.context or 4096
    _check(prefix, context=length, concurrency=concurrency, tensor_parallel=tensor_parallel)
    asked = Asked(length, concurrency, prefix, kv, reads, tensor_parallel, have)
    model, layers = found.model, cache.layers(found.model, kv, reads, tensor_parallel)
    prefill = decode = None
    if at is not None:
        cost = costs(kept, how, at, tensor_parallel)
        prefill, decode = cost.prefill(length), cost.decode(layers, length, concurrency)
    return Plan(
        kept,
        how,
        asked,
        parts(kept, how, asked, device),
        _most(lambda n: _over(kept, how, asked, device, context=n), MOST_CONTEXT, have),
        _most(lambda n: _over(kept, how, asked, device, concurrency=n), MOST_SEQUENCES, have),
        timing.crossover(model),
        at,
        prefill,
        decode,
        training(model, batch, length) if batch is not None else (),
        tuple(_notes(found, asked, length)),
        device,
    )


def _check(prefix: int, *, context: int, **counts: int) -> None:
    for name, value in {"context": context, **counts}.items():
        if value < 1:
            raise RequestError(f"{name} is {value}; it must be at least 1.")
    if not 0 <= prefix <= context:
        raise RequestError(f"A prefix of {prefix:,} tokens is no part of a context of {context:,}.")


def parts(source: Source, how: Stored, asked: Asked, device: str | None = None) -> tuple[Part, ...]:
    """What is taken on each device: weights, the cache by kind of layer, workspace, framework."""
    model = source.model
    held = (
        weights_of_file(source.sizes, asked.devices)
        if source.sizes is not None
        else weights(model, how, asked.devices)
    )
    layers = cache.layers(model, asked.kv, asked.source, asked.devices)
    what = layers, asked.context, asked.concurrency, asked.prefix
    return (
        held,
        *cache.cache(*what),
        *(() if device else (cache.rounding(*what),)),
        workspace(model, asked.concurrency, asked.context, 2 if device else 4),
        framework(model, held.bytes, device),
    )


def parts_at(found: Plan, **other: int) -> tuple[Part, ...]:
    """The parts of a plan with another context or concurrency."""
    asked = replace(found.asked, **other)  # type: ignore[arg-type]
    asked = replace(asked, prefix=min(asked.prefix, asked.context))
    return parts(found.source, found.how, asked, found.device)


def costs(source: Source, how: Stored, at: Profile, devices: int = 1) -> timing.Costs:
    """A source's times on a machine, by what its file holds rather than by the format that most of it has."""
    whole = weights(source.model, how).bytes
    packing = 1.0 if source.sizes is None else sum(source.sizes.values()) / whole
    return timing.Costs(source.model, how, at, devices, packing)


def _over(source: Source, how: Stored, asked: Asked, device: str | None, **other: int) -> int:
    changed = replace(asked, **other)  # type: ignore[arg-type]
    changed = replace(changed, prefix=min(changed.prefix, changed.context))
    return sum(part.bytes for part in parts(source, how, changed, device))


def _most(bytes_of: Callable[[int], int], end: int, have: int | None) -> int | None:
    """The largest number whose bytes fit, up to `end`."""
    if have is None:
        return None
    if bytes_of(end) <= have:
        return end
    low, high = 0, end
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bytes_of(middle) <= have else (low, middle)
    return low


def _notes(source: Source, asked: Asked, length: int) -> list[str]:
    found = [source.assumed] if source.assumed else []
    if source.context is not None and length > source.context:
        found.append(f"{length:,} tokens are more than the {source.context:,} that the model is made for.")
    if source.model.encoder is not None and source.model.decoder is not None and not asked.source:
        found.append("What an encoder makes of its source is not counted: say how much it reads.")
    heads = {mixer.kv_heads for mixer in source.model.trunk.mixers() if hasattr(mixer, "kv_heads")}
    if any(count % asked.devices for count in heads) and asked.devices > 1:
        found.append(
            f"{min(heads)} key/value heads do not divide evenly over {asked.devices} devices: "
            "some are kept twice."
        )
    if asked.devices > 1:
        found.append("What devices tell each other is not in the times.")
    return found
