"""What a Transformer does: the reference mathematics in torch, written to be read beside the papers."""

from qkv.nn.cache import Cache, ContiguousCache
from qkv.nn.layout import Layout
from qkv.nn.model import Transformer, tie
from qkv.nn.taps import NoTap, Tap, Taps, tap_names

__all__ = ["Cache", "ContiguousCache", "Layout", "NoTap", "Tap", "Taps", "Transformer", "tap_names", "tie"]
