"""How fast a machine runs a model, and how near to the limit of its memory that is: in a table."""

from qkv.benching.measuring import bench
from qkv.benching.report import Bench, Row, peers

__all__ = ["Bench", "Row", "bench", "peers"]
