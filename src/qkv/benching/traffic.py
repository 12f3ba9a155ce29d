"""What the memory must give for a step of decoding: the weights that are multiplied by, and the cache."""

from __future__ import annotations

from math import prod

from qkv.engine.requests import reads_prompt
from qkv.loading import Loaded
from qkv.verification.verifier import formats_of


def stored_as(loaded: Loaded) -> str:
    """The format of the matrices: "Q8_0", or of most of their bytes: "mostly Q4_1"."""
    kinds = formats_of(loaded)
    most = max(kinds, key=kinds.__getitem__, default="F32")
    return f"mostly {most}" if len(kinds) > 1 else most


def weight_bytes(loaded: Loaded, streams: int) -> float:
    """Bytes of weights, as the files store them, that a step of so many streams reads.

    Not read are what an encoder and towers have, what was made of a source once, and of tables that
    tokens are looked up in more than a row. Of experts a stream reads those that are chosen for it;
    several read some in common, of which there are as many here as with choices made by lot.
    """
    read: dict[str, float] = {}
    for tensor in loaded.spec.tensors():
        outside = not tensor.name.startswith(("decoder.", "head.")) or _of_source(tensor.name)
        inside = tensor.name.startswith("decoder.embedding.")
        looked_up = inside and len(tensor.shape) > 1 and not tensor.multiplies
        if not outside and not looked_up:
            read[tensor.key] = 1 - (1 - tensor.used / tensor.size) ** streams
    keys = {name: tensor.key for name, tensor in loaded.spec.weights().items()}
    total = 0.0
    for name, pieces in loaded.places.theirs.items():
        sizes = [(prod(piece.shape), read.get(keys[piece.ours], 0.0)) for piece in pieces]
        whole = sum(size for size, _ in sizes)
        total += loaded.files.tensors[name].nbytes * sum(size * share for size, share in sizes) / whole
    return total


def _of_source(name: str) -> bool:
    """Whether it makes the keys and values of a source, once for all tokens."""
    return ".cross.key." in name or ".cross.value." in name


def cache_bytes(loaded: Loaded, prompt: int, new: int, value_bytes: float) -> tuple[float, float]:
    """Tokens that a new one looks back at, its own included, on average over `new` after a prompt; and
    the bytes of keys and values that it reads for each of them. Windows end.
    """
    source = prompt if reads_prompt(loaded.spec) else 0
    context = (1 if source else prompt) + new / 2
    held = loaded.spec.cache_bytes(int(context), bytes_per_value=value_bytes, source=source)
    return context, held / context
