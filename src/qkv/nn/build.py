"""From a part of a description to the module that computes it: one registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from qkv.errors import UnsupportedError
from qkv.spec import Node

Module = TypeVar("Module", bound=type[nn.Module])
MODULES: dict[type[Node], Callable[..., nn.Module]] = {}


def implements(*kinds: type[Node]) -> Callable[[Module], Module]:
    """Registers a module class, built as `Class(node, *sizes)`, for these kinds of node."""

    def register(module: Module) -> Module:
        for kind in kinds:
            MODULES[kind] = module
        return module

    return register


def build(node: Node, *sizes: int) -> nn.Module:
    """The module for a node; `sizes` are those its `tensors` takes."""
    module = MODULES.get(type(node))
    if module is None:
        raise UnsupportedError(f"{type(node).__name__} can be described but not run in torch yet.")
    return module(node, *sizes)


def build_if(node: Node | None, *sizes: int) -> nn.Module | None:
    return None if node is None else build(node, *sizes)
