"""Requests to tokens."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qkv.engine.beams import BeamSearch
from qkv.engine.generation import stream
from qkv.engine.requests import Completion, Options, Request, check, request, room
from qkv.engine.sampling import Asked, Sampler, Sampling

if TYPE_CHECKING:
    from qkv.engine.serving import AsyncStream, Counters, Engine, Handle, Progress

__all__ = [
    "Asked",
    "AsyncStream",
    "BeamSearch",
    "Completion",
    "Counters",
    "Engine",
    "Handle",
    "Options",
    "Progress",
    "Request",
    "Sampler",
    "Sampling",
    "check",
    "request",
    "room",
    "stream",
]

# imported at first use: asyncio takes time, which a text made in the same thread need not wait for
_SERVING = {"AsyncStream", "Counters", "Engine", "Handle", "Progress"}


def __getattr__(name: str) -> Any:
    if name not in _SERVING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("qkv.engine.serving"), name)
