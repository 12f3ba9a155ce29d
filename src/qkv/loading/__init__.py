"""From a source to a model with its weights: find the files, describe, check, build, fill."""

from qkv.loading.checks import checked, weight_map
from qkv.loading.files import Files, entries, in_folder, opened
from qkv.loading.loaded import Loaded, load
from qkv.loading.parameters import Parameters, Progress

__all__ = [
    "Files",
    "Loaded",
    "Parameters",
    "Progress",
    "checked",
    "entries",
    "in_folder",
    "load",
    "opened",
    "weight_map",
]
