"""Requests to tokens."""

from qkv.engine.generation import Completion, Request, check, room, stream
from qkv.engine.sampling import Asked, Sampler, Sampling

__all__ = ["Asked", "Completion", "Request", "Sampler", "Sampling", "check", "room", "stream"]
