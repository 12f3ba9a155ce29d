"""Requests to tokens."""

from qkv.engine.beams import BeamSearch
from qkv.engine.generation import stream
from qkv.engine.requests import Completion, Options, Request, check, request, room
from qkv.engine.sampling import Asked, Sampler, Sampling

__all__ = [
    "Asked",
    "BeamSearch",
    "Completion",
    "Options",
    "Request",
    "Sampler",
    "Sampling",
    "check",
    "request",
    "room",
    "stream",
]
