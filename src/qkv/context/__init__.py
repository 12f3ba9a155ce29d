"""How far a context carries: measured on the model's own weights, and stretched without training."""

from qkv.context.extend import EXTENSIONS, extended
from qkv.context.measure import Context, context
from qkv.context.report import page

__all__ = ["EXTENSIONS", "Context", "context", "extended", "page"]
