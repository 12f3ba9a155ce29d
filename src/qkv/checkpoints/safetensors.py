"""safetensors: one file, or a folder of shards with an index, read strictly both ways.

The format is `length (u64), header (JSON), data`; the safetensors library validates it. The data is
mapped here, and not by the library, so that formats numpy lacks (bfloat16, float8) can be read
without torch.
"""

import json
import mmap
import os
import secrets
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

from qkv.checkpoints.formats import PLAIN
from qkv.checkpoints.refusals import is_pickle, refuse_impostor, refuse_pickle, require_file, shown
from qkv.checkpoints.tensor import StoredTensor
from qkv.errors import CheckpointError, SourceError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = 5 * 10**9  # bytes; what a writer of shards holds in memory at a time
LARGEST_INDEX = 64 << 20  # bytes; the index of a trillion-parameter model takes 10 MB

# The library's writer wants the names that numpy and torch have for the formats.
WRITTEN_AS = {format.name: dtype.name for dtype, format in PLAIN.items()} | {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, of an index and its shards, or of a folder that has either.

    With an index, each named shard must be there and must hold exactly the tensors that the index
    places in it; other files in the folder are left alone.

    Raises `SourceError` where there is nothing to read, `CheckpointError` where a file is damaged, is
    hostile, disagrees with the index, or is a pickle.
    """
    path = Path(path)
    if path.is_dir():
        return _read_folder(path)
    require_file(path)
    if is_pickle(path):
        refuse_pickle(path)
    return _read_shards(path) if path.name.endswith(".index.json") else _read_file(path)


def write_safetensors(
    path: Path, tensors: Mapping[str, np.ndarray | StoredTensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write `tensors` under their keys: arrays in their own dtype, stored tensors byte for byte.

    The file appears whole or not at all, and replaces one of the same name; tensors mapped from the
    replaced file stay valid. transformers reads only files with `metadata={"format": "pt"}`.

    Raises `CheckpointError` for a tensor that safetensors has no format for, `SourceError` where the
    folder does not exist.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise SourceError(f"{path.parent} is not a folder, so {path.name} cannot be written there.")
    stored = {name: _storable(name, tensor) for name, tensor in tensors.items()}
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        specs = {
            name: TensorSpec(
                dtype=WRITTEN_AS[each.format],
                shape=list(each.shape),
                data_ptr=each.data.ctypes.data,  # `stored` keeps the bytes alive until they are written
                data_len=each.nbytes,
            )
            for name, each in stored.items()
        }
        serialize_file(specs, part, metadata=dict(metadata) if metadata else None)
        with part.open("rb") as file:
            os.fsync(file.fileno())  # a rename may reach the disk before the contents do
        part.replace(path)
    except (SafetensorError, OSError, UnicodeError) as error:
        raise CheckpointError(f"{path.name} could not be written: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def write_shards(folder: Path, tensors: Iterable[StoredTensor], size: int = SHARD) -> None:
    """Write a model's tensors as transformers reads them: one file, or shards of `size` bytes and an index.

    Tensors are taken one at a time, and none is held longer than its shard. A tensor larger than
    `size` has a shard of its own. Errors as of `write_safetensors`.
    """
    where: dict[str, Path] = {}
    held: dict[str, StoredTensor] = {}
    parts: list[Path] = []
    total = 0

    def write() -> None:
        parts.append(folder / f".{len(parts)}.safetensors.part")
        write_safetensors(parts[-1], held, {"format": "pt"})
        where.update(dict.fromkeys(held, parts[-1]))
        held.clear()

    try:
        for tensor in tensors:
            if held and sum(each.nbytes for each in held.values()) + tensor.nbytes > size:
                write()
            held[tensor.name] = tensor
            total += tensor.nbytes
        write()
        names = {part: _shard_name(i, len(parts)) for i, part in enumerate(parts, 1)}
        for part, name in names.items():
            part.replace(folder / name)
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
    if len(parts) > 1:  # last: a folder without it is no model
        index = {"metadata": {"total_size": total}, "weight_map": {n: names[p] for n, p in where.items()}}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shard_name(number: int, of: int) -> str:
    return SINGLE if of == 1 else f"model-{number:05}-of-{of:05}.safetensors"


def _storable(name: str, tensor: np.ndarray | StoredTensor) -> StoredTensor:
    if name == "__metadata__":
        raise CheckpointError(
            "a tensor cannot be called __metadata__: safetensors keeps that name for itself."
        )
    stored = tensor if isinstance(tensor, StoredTensor) else StoredTensor.from_array(name, tensor)
    if stored.format not in WRITTEN_AS:
        raise CheckpointError(
            f"tensor {shown(name)} is stored as {stored.format}, which safetensors has no format for; "
            "write its decode() instead."
        )
    if not stored.data.flags.c_contiguous:  # the library is given a pointer and a length
        return StoredTensor(name, stored.shape, stored.format, stored.data.copy())
    return stored


def _read_folder(folder: Path) -> dict[str, StoredTensor]:
    single, index = folder / SINGLE, folder / INDEX
    if index.is_file():
        if single.is_file() and SINGLE not in _weight_map(index).values():
            # transformers would read the single file, others the shards; only the user can tell.
            raise CheckpointError(
                f"{folder} has {SINGLE}, and {INDEX} names other files; "
                "pass the path of the one that is meant."
            )
        return _read_shards(index)
    if single.is_file():
        return _read_file(single)
    files = sorted(each for each in folder.iterdir() if each.is_file())
    if not files:
        raise SourceError(f"{folder} holds no files.")
    missing = f"{folder} has neither {SINGLE} nor {INDEX}"
    for file in files:
        if file.name.endswith((".safetensors", ".safetensors.index.json", ".gguf")):
            raise SourceError(f"{missing}; pass the path of {shown(file.name)} if that is the model.")
    for file in files:
        if is_pickle(file):
            refuse_pickle(file)
    raise SourceError(f"{missing}.")


def _read_shards(index: Path) -> dict[str, StoredTensor]:
    where = _weight_map(index)
    shards = list(dict.fromkeys(where.values()))
    for shard in shards:
        # Names are not resolved: in a hub cache every shard is a link to a file outside the folder.
        if not (index.parent / shard).is_file():
            raise CheckpointError(
                f"{index.name} names {shown(shard)}, which is not in {index.parent}; "
                "the download may be incomplete."
            )
    found: dict[str, StoredTensor] = {}
    for shard in shards:
        for name, tensor in _read_file(index.parent / shard).items():
            if where.get(name) != shard:
                place = f"places in {shown(where[name])}" if name in where else "does not name"
                raise CheckpointError(
                    f"{shown(shard)} holds tensor {shown(name)}, which {index.name} {place}."
                )
            found[name] = tensor
    for name, shard in where.items():
        if name not in found:
            raise CheckpointError(
                f"{index.name} places tensor {shown(name)} in {shown(shard)}, which does not hold it."
            )
    return {name: found[name] for name in where}


def _weight_map(index: Path) -> dict[str, str]:
    """The index's table: tensor name -> shard name. Shards lie beside the index, never elsewhere."""
    if index.stat().st_size > LARGEST_INDEX:
        raise CheckpointError(f"{index.name} is larger than {LARGEST_INDEX:,} bytes, which no index needs.")
    content = _json(index, index.read_bytes())
    where = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(where, dict) or not all(isinstance(shard, str) for shard in where.values()):
        raise CheckpointError(f"{index.name} has no weight_map from tensor names to file names.")
    for name, shard in where.items():
        if shard in ("", ".", "..") or any(mark in shard for mark in "/\\\0"):
            raise CheckpointError(
                f"{index.name} places tensor {shown(name)} in {shown(shard)}, which is not a plain file name."
            )
    return where


class _Entry(NamedTuple):
    name: str
    format: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _read_file(path: Path) -> dict[str, StoredTensor]:
    require_file(path)
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        refuse_impostor(path, wanted="safetensors")
        raise CheckpointError(_diagnosis(path, error)) from error
    entries, start = _header(path)
    with path.open("rb") as file:
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)[start:]
    return {
        each.name: StoredTensor(each.name, each.shape, each.format, data[each.begin : each.end])
        for each in entries
    }


def _header(path: Path) -> tuple[list[_Entry], int]:
    """The entries of a header that the library has found sound, and where the data begins.

    Read again here for the offsets, which the library keeps to itself, and because of two entries of
    one name it would return the last without a word.
    """
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = _json(path, file.read(length))
    header.pop("__metadata__", None)
    try:
        entries = [
            _Entry(name, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in header.items()
        ]
    except (TypeError, KeyError):  # the library also takes an entry written as a list
        entries = []
    if len(entries) != len(header) or not all(isinstance(each.format, str) for each in entries):
        raise CheckpointError(f"{path.name} has a header whose entries lack dtype, shape or data_offsets.")
    return entries, 8 + length


def _diagnosis(path: Path, error: Exception) -> str:
    if "incomplete metadata" in str(error):  # a sound header, and data of another length
        entries, start = _header(path)
        need = start + max((each.end for each in entries), default=0)
        return (
            f"{path.name} has {path.stat().st_size:,} bytes and its header describes {need:,}; "
            "the download may be incomplete."
        )
    reason = str(error).removeprefix("Error while deserializing header: ")
    return f"{path.name} is damaged, or not a safetensors file: {shown(reason, limit=200)}."


def _json(path: Path, text: bytes) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(f"{path.name} has two entries named {shown(twice)}.")
        return table

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not valid JSON: {shown(str(error))}.") from error
