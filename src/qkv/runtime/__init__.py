"""How a description runs without torch: lowered to a flat program of a few kinds of operation."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qkv.runtime.interpreter import Interpreter, Kept, Rows
    from qkv.runtime.lower import Lowered
    from qkv.runtime.program import Program

__all__ = ["Interpreter", "Kept", "Lowered", "Program", "Rows"]

# imported at first use: `qkv --version` asks for the native module alone, and should not wait for numpy
_LAZY = {
    "Interpreter": "qkv.runtime.interpreter",
    "Kept": "qkv.runtime.interpreter",
    "Lowered": "qkv.runtime.lower",
    "Program": "qkv.runtime.program",
    "Rows": "qkv.runtime.interpreter",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'qkv.runtime' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
