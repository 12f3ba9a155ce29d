"""What a plan needs of a source: its description, and how its weights are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qkv.checkpoints import read_gguf, read_safetensors
from qkv.errors import QkvError, SourceError, UnsupportedError
from qkv.inspection import inspect
from qkv.planning.weights import Stored, stored
from qkv.sources import find
from qkv.spec import Model

PACKED = {"fp8": "fp8", "mxfp4": "mxfp4", "float8": "fp8"}  # what configurations call what is packed


@dataclass(frozen=True)
class Source:
    """`sizes` are the bytes of the tensors in its files, where they are there; `how` is what most have."""

    name: str
    model: Model
    context: int | None
    how: Stored
    sizes: Mapping[str, int] | None = None
    assumed: str | None = None  # what was not stated, in words


def read(source: str | Path | Model) -> Source:
    """From small files and the headers of large ones; a description is planned for in bf16.

    UnsupportedError for what could not be described.
    """
    if isinstance(source, Model):
        return Source("the model", source, None, stored("bf16"))
    found = inspect(source)
    if found.model is None:
        why = found.unknown[0] if found.unknown else "it could not be described"
        raise UnsupportedError(f"{found.name} cannot be planned for: {why}")
    sizes, formats = _sizes(source)
    if formats:
        most = max(formats, key=formats.__getitem__)
        return Source(found.name, found.model, found.context, stored(most), sizes)
    named = PACKED.get(str(found.stored), found.stored)
    assumed = None if named else "the configuration does not say how weights are stored: bf16 is assumed"
    try:
        how = stored(named or "bf16")
    except QkvError:
        how, assumed = stored("bf16"), f"weights stored as {named} are counted as bf16: choose with weights="
    return Source(found.name, found.model, found.context, how, None, assumed)


def _sizes(source: str | Path) -> tuple[dict[str, int] | None, dict[str, int]]:
    """Bytes by tensor, and by format; nothing where there is only a configuration.

    Raises CheckpointError for weights that are damaged.
    """
    path = find(source)
    if path.suffix == ".json" and not path.name.endswith(".index.json"):
        return None, {}
    try:
        tensors = read_gguf(path).tensors if path.suffix.lower() == ".gguf" else read_safetensors(path)
    except SourceError:  # no weights beside the configuration
        return None, {}
    formats: dict[str, int] = {}
    for tensor in tensors.values():
        formats[tensor.format] = formats.get(tensor.format, 0) + tensor.nbytes
    return {name: tensor.nbytes for name, tensor in tensors.items()}, formats
