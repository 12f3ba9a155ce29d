"""From a source to a model with its weights: find the files, describe, build, fill, check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qkv.checkpoints import FORMATS, StoredTensor, read_gguf, read_safetensors
from qkv.errors import CapacityError, CheckpointError, RequestError, SourceError, UnsupportedError
from qkv.families import Description, describe, describe_gguf, family_of, gguf, sentence
from qkv.families.weights import WeightMap, pieces
from qkv.generation_config import NAME as GENERATION, check, ends
from qkv.memory import free_memory
from qkv.nn import Transformer, tie
from qkv.sources import WEIGHT_FILES, find, read_json
from qkv.spec import Tokens
from qkv.text import Tokenizer, from_folder, from_gguf

Progress = Callable[[int, int], None]  # tensors done, tensors in all


SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
SAVED = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}
FLOATS = {kind: dtype for dtype, kind in SAVED.items()}


@dataclass(frozen=True)
class Loaded:
    """What a source holds, without the keys that were ignored.

    `config` is its config.json and `generation` its generation_config.json, {} where there is none.
    `modules` are the files that say how it embeds, by name.
    `carried` are tensors that hold no parameter, to be saved with it again.
    """

    model: Transformer
    tokenizer: Tokenizer | None
    context: int | None
    eos_ids: frozenset[int]
    source: Path
    description: Description
    config: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    modules: Mapping[str, Any] = field(default_factory=dict)
    carried: Mapping[str, StoredTensor] = field(default_factory=dict)

    @property
    def vocab(self) -> int:
        """How many token ids the model knows."""
        tokens = self.model.spec.trunk.input
        return tokens.vocab if isinstance(tokens, Tokens) else 0


def load(
    source: str | Path,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    ignore: str | Iterable[str] | None = (),
    progress: Progress | None = None,
) -> Loaded:
    """Reads a model and its weights.

    `source`: a folder in Hugging Face layout (or its config.json, or one weight file in it), a .gguf
    file, a hub name ("org/name"), or a packaged model ("smollm2"). `dtype` None follows the file
    (quantised weights become float32).

    `ignore` names what to do without, one name or several: keys of the configuration or of the
    generation configuration, at any level, or tensors, by name or pattern ("visual.*"). Each must
    match something that can be left out, so that a slip of the pen is not taken for a change of the
    model; `model_type` and `architectures` say which model it is and cannot be ignored.

    Raises a QkvError: of the source, its configuration, its weights or its tokenizer, or for more
    memory than is free. Nothing is half loaded.
    """
    path, ignore, where = find(source), entries(ignore), _device(device)
    files = opened(path, ignore)
    model = fill(files, _dtype(dtype, files.tensors), where, ignore, progress)
    return Loaded(
        model=model,
        tokenizer=files.tokenizer,
        context=files.description.context,
        eos_ids=files.ends,
        source=path,
        description=files.description,
        config=files.config,
        generation=files.generation,
        modules=files.modules,
        carried=_carried(files, ignore),
    )


@dataclass(frozen=True)
class _Files:
    """What the files of a source say, before a model is built."""

    name: str
    description: Description
    tensors: Mapping[str, StoredTensor]
    tokenizer: Tokenizer | None
    ends: frozenset[int]
    ignored: frozenset[str]  # entries of `ignore` that named a key
    config: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    modules: Mapping[str, Any] = field(default_factory=dict)


def in_folder(path: Path) -> bool:
    """Whether what `find` gave is a folder in Hugging Face layout, or a weight file in one."""
    return path.is_dir() or path.name.endswith(WEIGHT_FILES)


def opened(path: Path, ignore: tuple[str, ...] = ()) -> _Files:
    """What the files say, each tensor still mapped."""
    return _open_folder(path, ignore) if in_folder(path) else _open_gguf(path, ignore)


def entries(ignore: str | Iterable[str] | None) -> tuple[str, ...]:
    """What to ignore as a tuple, of names that can be."""
    if isinstance(ignore, str):
        ignore = (ignore,)
    entries = tuple(ignore) if isinstance(ignore, Iterable) else () if ignore is None else (ignore,)
    if not all(isinstance(entry, str) for entry in entries):
        raise RequestError(f"ignore is {ignore!r}; it must name a key or a tensor, or be a list of names.")
    for entry in entries:
        if entry in ("model_type", "architectures"):
            raise RequestError(
                f"{entry} says which model this is, so it cannot be ignored: "
                "correct config.json if it says the wrong thing."
            )
    return entries


def _without(data: Any, ignore: Iterable[str], found: set[str]) -> Any:
    """The data without the keys to ignore, at any level; those there were are added to `found`."""
    if isinstance(data, list):
        return [_without(value, ignore, found) for value in data]
    if not isinstance(data, dict):
        return data
    found |= data.keys() & set(ignore)
    return {key: _without(value, ignore, found) for key, value in data.items() if key not in ignore}


def _open_gguf(path: Path, ignore: tuple[str, ...]) -> _Files:
    """A GGUF file. Its keys can be ignored by their own names or by those of a config.json."""
    file, ignored = read_gguf(path), set[str]()
    called = gguf.names(str(file.metadata.get("general.architecture")))
    ignored |= set(ignore) & {called.get(key) for key in file.metadata}
    ignored |= set(ignore) & file.metadata.keys()
    metadata = {key: value for key, value in file.metadata.items() if key not in ignore}
    # the description reads this one, so it has to go before
    left_out = set(gguf.IRRELEVANT) & set(ignore)
    tensors = {name: tensor for name, tensor in file.tensors.items() if name not in left_out}
    if "rope_freqs.weight" in tensors or any(".rope.scaling." in key for key in metadata):
        ignored |= {"rope_scaling"} & set(ignore)
    description = describe_gguf(metadata, tensors, path.name, ignore)
    tokenizer = from_gguf(metadata) if "tokenizer.ggml.model" in metadata else None
    stops = tokenizer.eos_ids if tokenizer else frozenset[int]()
    return _Files(path.name, description, file.tensors, tokenizer, stops, frozenset(ignored))


def _open_folder(path: Path, ignore: tuple[str, ...]) -> _Files:
    """A folder, or the weight file in it that is meant."""
    folder = path if path.is_dir() else path.parent
    found, ignored = read_json(folder / "config.json"), set[str]()
    if found is None:
        raise SourceError(f"{folder} has no config.json; a model folder holds one beside its weights.")
    kind = found.get("model_type")
    defaults = family_of(kind, "config.json").defaults.get(str(kind), {}).keys() & set(ignore)
    # null: were they absent, they would have the values of the class that wrote the file
    config = _without(found, ignore, ignored) | dict.fromkeys(defaults)
    generation = _without(read_json(folder / GENERATION) or {}, ignore, ignored)
    check(generation)
    description, tensors = describe(config, "config.json", ignore), read_safetensors(path)
    ignored |= {sentence.MODULES} & set(ignore) if (folder / sentence.MODULES).is_file() else set()
    modules = {} if sentence.MODULES in ignored else sentence.files(folder)
    if modules:
        description = replace(description, model=replace(description.model, head=sentence.head(modules)))
    tensors = _today(path.name, tensors, description)
    if not any(name.startswith(description.prefix) for name in tensors):
        description = description.bare()
    tokenizer = from_folder(folder) if (folder / "tokenizer.json").is_file() else None
    stops = ends(generation, GENERATION) | ends(config, "config.json")
    stops |= tokenizer.eos_ids if tokenizer else frozenset()
    ignored |= defaults
    return _Files(
        path.name, description, tensors, tokenizer, stops, frozenset(ignored), config, generation, modules
    )


def _today(
    source: str, tensors: Mapping[str, StoredTensor], description: Description
) -> dict[str, StoredTensor]:
    """The tensors by their names of today."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        start = next((start for start in description.moved if name.startswith(start)), "")
        end = next((end for end in description.older if name.endswith(end)), "")
        now = description.moved.get(start, "") + name.removeprefix(start)
        now = now.removesuffix(end) + description.older.get(end, "")
        if now in found:
            raise CheckpointError(f"{source} holds {now} twice, under another name as well.")
        found[now] = tensor
    return found


def _dtype(asked: torch.dtype | str | None, tensors: Mapping[str, StoredTensor]) -> torch.dtype:
    """What was asked for, else the type most of the file is stored in."""
    if asked is not None:
        found = getattr(torch, SHORT.get(asked, asked), None) if isinstance(asked, str) else asked
        if not isinstance(found, torch.dtype) or found not in FLOATS.values():
            raise RequestError(f"dtype {asked!r} is not known (float32, bfloat16, float16, float64).")
        return found
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        sizes[tensor.format] = sizes.get(tensor.format, 0) + tensor.nbytes
    return FLOATS.get(max(sizes, key=sizes.__getitem__, default=""), torch.float32)


def _device(asked: torch.device | str) -> torch.device:
    try:
        device = torch.device(asked)
        if device.type == "meta":
            raise RuntimeError("it holds no values")
        torch.empty(0, device=device)
    except TypeError:
        raise RequestError(f'device is {asked!r}; it must be a name such as "cpu" or "cuda:0".') from None
    except (RuntimeError, AssertionError) as problem:
        reason = str(problem).splitlines()[0].rstrip(".")
        raise RequestError(f"device {str(asked)!r} cannot be used here: {reason}.") from None
    return device


def fill(
    files: _Files,
    dtype: torch.dtype,
    device: torch.device,
    ignore: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> Transformer:
    """The model with every parameter from the files; every tensor used, or known not to matter."""
    places = checked(files, ignore)
    _check_memory(files, dtype, device)
    # built once the files have proven the sizes: a configuration alone could ask for anything
    with torch.device("meta"):
        model = Transformer(files.description.model).requires_grad_(False)
    state = {}
    for done, ours in enumerate(places.ours, 1):
        try:
            state[ours] = _converted(files, places, ours, dtype, device)
        except (MemoryError, RuntimeError) as problem:
            if "memory" not in str(problem) and not isinstance(problem, MemoryError):
                raise
            raise _too_large(files, dtype, None) from None
        if progress is not None:
            progress(done, len(places.ours))
    model.load_state_dict(state, strict=False, assign=True)
    tie(model, files.description.model)
    return model.eval()


def checked(files: _Files, ignore: tuple[str, ...] = ()) -> WeightMap:
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


def _check_present(files: _Files) -> None:
    """Before anything is made of the configuration: it may call for more tensors than can be counted."""
    wanted = (piece.place.name for piece in pieces(_shapes(files.description), files.description.weights))
    missing = [*dict.fromkeys(islice((name for name in wanted if name not in files.tensors), 1000))]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise CheckpointError(f"{files.name} lacks {missing[0]}{more}, which its configuration calls for.")


def _check_unused(files: _Files, places: WeightMap, ignore: tuple[str, ...]) -> None:
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


def _carried(files: _Files, ignore: tuple[str, ...]) -> dict[str, StoredTensor]:
    used, irrelevant = weight_map(files.description).theirs, files.description.irrelevant
    return {
        name: tensor
        for name, tensor in files.tensors.items()
        if name not in used and _matches(name, irrelevant) and not _matches(name, ignore)
    }


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a tensor's name is one of these or fits one of them: names may hold [brackets]."""
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def _copies(files: _Files, places: WeightMap) -> dict[str, str]:
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


def _check_tensors(files: _Files, places: WeightMap) -> None:
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


def _check_memory(files: _Files, dtype: torch.dtype, device: torch.device) -> None:
    """Before anything is allocated: a process that takes too much is killed without a word."""
    free = free_memory(device)
    if free is not None and _needed(files, dtype) > free:
        raise _too_large(files, dtype, free)


def _needed(files: _Files, dtype: torch.dtype) -> int:
    return files.description.model.parameters() * dtype.itemsize


def _too_large(files: _Files, dtype: torch.dtype, free: int | None) -> CapacityError:
    kind, there = str(dtype).removeprefix("torch."), "less" if free is None else _gigabytes(free)
    way_on = 'load it with dtype="bfloat16", or choose' if dtype.itemsize > 2 else "choose"
    return CapacityError(
        f"{files.name} needs {_gigabytes(_needed(files, dtype))} of memory as {kind}, and {there} is free: "
        f"{way_on} a smaller model."
    )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"


def _converted(
    files: _Files, places: WeightMap, ours: str, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    names = [piece.place.name for piece in places.ours[ours]]
    bits = {files.tensors[name].format for name in names} == {"BF16"}
    values = to_torch(places.read(ours, lambda name: _array(files.tensors[name], bits)), bits)
    found = values.to(device=device, dtype=dtype)
    if dtype == torch.float16 and values.dtype != dtype and not bool(found.isfinite().all()):
        raise CheckpointError(
            f'{names[0]} holds values that float16 cannot: load with dtype="bfloat16" or "float32".'
        )
    return found


def _array(stored: StoredTensor, bits: bool = False) -> np.ndarray:
    """The values, or with `bits` those of bfloat16 as whole numbers: numpy has no such type."""
    return stored.data.view(np.uint16).reshape(stored.shape) if bits else stored.decode()


def to_torch(values: np.ndarray, bits: bool = False) -> torch.Tensor:
    """An array as a tensor of its own memory, and of no more than it needs."""
    base = values.base if isinstance(values.base, np.ndarray) else values
    own = values.flags.writeable and values.flags.c_contiguous and base.nbytes == values.nbytes
    found = torch.from_numpy(values if own else np.array(values, order="C"))
    return found.view(torch.bfloat16) if bits else found


def stored_tensors(loaded: Loaded) -> Iterator[StoredTensor]:
    """The model as its checkpoint held it: the weight table read backwards, shared tensors once.

    What holds no parameter (a buffer, the layers that guess ahead) comes along unchanged.
    """
    parameters = dict(loaded.model.named_parameters(remove_duplicate=False))
    places, values = weight_map(loaded.description), dict[str, np.ndarray]()
    for name, together in places.theirs.items():
        dtype = parameters[together[0].ours].dtype  # of several in one tensor, the first one's
        # a stack of experts is fetched once, not once for each
        ours = {piece.ours for piece in together}
        values = {
            each: values[each] if each in values else _bits(parameters[each].to(dtype)) for each in ours
        }
        flat = np.ascontiguousarray(places.write(name, values.__getitem__)).reshape(-1)
        yield StoredTensor(name, places.shape(name), SAVED[dtype], flat.view(np.uint8))
    yield from loaded.carried.values()


def _bits(tensor: torch.Tensor) -> np.ndarray:
    values = tensor.detach().cpu()
    return (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()
