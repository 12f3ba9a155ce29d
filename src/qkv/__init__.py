"""One exact, readable model of the Transformer, and everything people do with one.

import qkv

model = qkv.load("smollm2")
for text in model.stream("The capital of France is"):
    print(text, end="")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qkv.errors import QkvError

if TYPE_CHECKING:
    from qkv.explanation import explain
    from qkv.inspection import compare, inspect
    from qkv.model import Model, load
    from qkv.planning import plan

__version__ = "0.1.0"
__all__ = ["Model", "QkvError", "__version__", "compare", "explain", "inspect", "load", "plan"]

# imported at first use: reading a description should not wait for torch
_LAZY = {
    "Model": "qkv.model",
    "compare": "qkv.inspection",
    "explain": "qkv.explanation",
    "inspect": "qkv.inspection",
    "load": "qkv.model",
    "plan": "qkv.planning",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'qkv' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
