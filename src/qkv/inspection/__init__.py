"""Reading a model: the eight steps, the context verdict, two models compared, the diagram. No torch."""

from pathlib import Path

from qkv.inspection.comparison import Comparison, between
from qkv.inspection.diagram import diagram
from qkv.inspection.page import page
from qkv.inspection.read import inspect
from qkv.inspection.report import Inspection
from qkv.inspection.verdict import Verdict

__all__ = ["Comparison", "Inspection", "Verdict", "compare", "diagram", "inspect", "page"]


def compare(left: str | Path, right: str | Path) -> Comparison:
    """What differs between the models of two sources, and what follows from it."""
    return between(inspect(left), inspect(right))
