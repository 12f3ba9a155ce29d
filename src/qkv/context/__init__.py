"""How far a context carries: measured on the model's own weights, and stretched without training."""

from qkv.context.budget import Compared, compare
from qkv.context.extend import EXTENSIONS, extended
from qkv.context.measure import Context, context
from qkv.context.report import page
from qkv.context.retrieve import Lexical, Semantic

__all__ = [
    "EXTENSIONS", "Compared", "Context", "Lexical", "Semantic", "compare", "context", "extended", "page",
]  # fmt: skip
