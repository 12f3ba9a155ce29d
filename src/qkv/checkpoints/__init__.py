"""Files <-> named arrays, in numpy alone: safetensors, GGUF, and the block formats GGUF stores.

Reading is strict and bounded. A file either gives every tensor it declares, or one `CheckpointError`
says what is wrong with it; nothing is allocated for a count the file could not hold. Tensors stay
memory-mapped until `decode` is called on them.
"""

from qkv.checkpoints.formats import FORMATS, Format
from qkv.checkpoints.gguf import Gguf, read_gguf
from qkv.checkpoints.gguf_writer import Outline, write_gguf
from qkv.checkpoints.mapped import release
from qkv.checkpoints.quantisers import ENCODERS, quantise, squared_error
from qkv.checkpoints.refusals import refuse_pickle
from qkv.checkpoints.safetensors import read_safetensors, write_safetensors, write_shards
from qkv.checkpoints.tensor import StoredTensor

__all__ = [
    "ENCODERS",
    "FORMATS",
    "Format",
    "Gguf",
    "Outline",
    "StoredTensor",
    "quantise",
    "read_gguf",
    "read_safetensors",
    "refuse_pickle",
    "release",
    "squared_error",
    "write_gguf",
    "write_safetensors",
    "write_shards",
]
