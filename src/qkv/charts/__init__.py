"""Charts as SVG text: curves, bars, heat maps, paths over images; axes with round numbers."""

from qkv.charts.pictures import HALF, INSIDE, Bar, Panel, Series, bars, curves, heat, path, picture
from qkv.charts.scales import Axis, Scale, number

__all__ = [
    "HALF", "INSIDE", "Axis", "Bar", "Panel", "Scale", "Series",
    "bars", "curves", "heat", "number", "path", "picture",
]  # fmt: skip
