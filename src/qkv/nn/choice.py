"""Which backend a model's attention runs on."""

from __future__ import annotations

from typing import Any

from torch import nn

from qkv.errors import RequestError, UnsupportedError
from qkv.nn.backends import Backend, Reference
from qkv.nn.sdpa import SDPA


def named(name: str) -> Backend:
    """The backend called "reference", "sdpa" or "flex"."""
    from qkv.nn.flex import Flex  # brings in torch's compiler, which takes a while

    known: dict[str, type[Backend]] = {"reference": Reference, "sdpa": SDPA, "flex": Flex}
    if name not in known:
        raise RequestError(f"There is no backend {name!r}; there are {', '.join(known)}.")
    return known[name]()


def use(module: nn.Module, backend: Backend) -> None:
    """Makes every attention in the module run on this backend.

    Raises UnsupportedError, naming what is lacking, before anything is changed. Taps of scores and
    weights are still answered: a call that reads them runs on the reference.
    """
    parts: list[Any] = [part for part in module.modules() if hasattr(part, "backend")]
    for part in parts:
        lacking = backend.lacks(part.node)
        if lacking is not None:
            raise UnsupportedError(f"The {backend.name} backend lacks {lacking}; use the reference.")
    for part in parts:
        part.backend = backend
