"""How a description runs without torch: lowered to a flat program of a few kinds of operation."""

from qkv.runtime.interpreter import Interpreter, Kept, Rows
from qkv.runtime.lower import Lowered, lower
from qkv.runtime.program import Program

__all__ = ["Interpreter", "Kept", "Lowered", "Program", "Rows", "lower"]
