"""How far a context carries: measured on the model's own weights, and stretched without training."""

from qkv.context.budget import Compared, compare
from qkv.context.extend import EXTENSIONS, extended
from qkv.context.measure import context
from qkv.context.page import page
from qkv.context.result import Context
from qkv.context.retrieve import Lexical, Semantic

__all__ = [
    "EXTENSIONS", "Compared", "Context", "Lexical", "Semantic", "compare", "context", "extended", "page",
]  # fmt: skip
