"""Whether the files hold every parameter, as it must be, and nothing that would be left out in silence."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from itertools import islice

from qkv.checkpoints import FORMATS, StoredTensor
from qkv.errors import CheckpointError, RequestError, UnsupportedError
from qkv.families import Description
from qkv.families.weights import WeightMap, pieces
from qkv.loading.files import Files


def checked(files: Files, ignore: tuple[str, ...] = ()) -> WeightMap:
    """Where the parameters stand, once the files were seen to hold them all, as they must be, and no more."""
    if not files.description.weights:
        raise UnsupportedError(f"{files.name}: this kind of model can be inspected but not loaded yet.")
    _check_present(files)
    places = weight_map(files.description)
    _check_unused(files, places, ignore)
    _check_tensors(files, places)
    return places


def weight_map(description: Description) -> WeightMap:
    """Where the parameters stand in a checkpoint, shared ones once."""
    return WeightMap(_shapes(description), description.weights)


def _shapes(description: Description) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in description.model.weights().items()}


def _check_present(files: Files) -> None:
    """Before anything is made of the configuration: it may call for more tensors than can be counted."""
    wanted = (piece.place.name for piece in pieces(_shapes(files.description), files.description.weights))
    missing = [*dict.fromkeys(islice((name for name in wanted if name not in files.tensors), 1000))]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise CheckpointError(f"{files.name} lacks {missing[0]}{more}, which its configuration calls for.")


def _check_unused(files: Files, places: WeightMap, ignore: tuple[str, ...]) -> None:
    unused = files.tensors.keys() - places.theirs.keys()
    patterns = (*files.description.irrelevant, *ignore)
    copies = _copies(files, places)
    for name in sorted(unused):
        if _matches(name, patterns):
            continue
        if name not in copies:
            problem = "which its configuration has no place for"
        elif not _same(files.tensors[name], files.tensors[copies[name]]):
            problem = f"which differs from {copies[name]} though its configuration ties the two"
        else:
            continue
        raise CheckpointError(
            f'{files.name} holds {name}, {problem}. Pass ignore=("{name}",) to load without it.'
        )
    for entry in ignore:
        if entry not in files.ignored and not any(_matches(name, [entry]) for name in unused):
            raise RequestError(
                f"ignore names {entry!r}, which is no configuration key of {files.name} and no tensor "
                "that the model can do without."
            )


def carried(files: Files, ignore: tuple[str, ...]) -> dict[str, StoredTensor]:
    used, irrelevant = weight_map(files.description).theirs, files.description.irrelevant
    return {
        name: tensor
        for name, tensor in files.tensors.items()
        if name not in used and _matches(name, irrelevant) and not _matches(name, ignore)
    }


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a tensor's name is one of these or fits one of them: names may hold [brackets]."""
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def _copies(files: Files, places: WeightMap) -> dict[str, str]:
    """Names under which some tools save a shared tensor again, and the name it is read by."""
    description = files.description
    shared = {tensor.name: tensor for tensor in description.model.tensors()}
    first = {shared[ours].key: found[0].place.name for ours, found in places.ours.items()}
    others = {ours: tensor.shape for ours, tensor in shared.items() if ours not in places.ours}
    again = {
        piece.place.name: first[shared[piece.ours].key]
        for piece in pieces(others, description.weights)
        if piece.place.part is None and piece.item is None
    }
    return {**description.copies, **again}


def _same(a: StoredTensor, b: StoredTensor) -> bool:
    return (a.format, a.shape) == (b.format, b.shape) and bool((a.data == b.data).all())


def _check_tensors(files: Files, places: WeightMap) -> None:
    for name in places.theirs:
        stored, shape = files.tensors[name], places.shape(name)
        if stored.shape != shape:
            raise CheckpointError(
                f"{files.name}: {name} has shape {stored.shape}; the configuration makes it {shape}."
            )
        plain = FORMATS[stored.format].dtype
        if plain is not None and plain.kind != "f":
            raise CheckpointError(
                f"{files.name}: {name} is stored as {stored.format}; "
                "a weight must be a floating-point number, or in a block format of GGUF."
            )
