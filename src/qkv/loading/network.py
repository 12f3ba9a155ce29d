"""The torch modules of a model, filled from its files, and their values as files hold them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from qkv.checkpoints import StoredTensor
from qkv.errors import CheckpointError, RequestError
from qkv.families.weights import WeightMap
from qkv.loading.files import Files
from qkv.loading.loaded import STORED, Loaded
from qkv.loading.parameters import Progress
from qkv.loading.room import check_memory, too_large
from qkv.nn import Transformer, tie

SAVED = {getattr(torch, name): stored for name, stored in STORED.items()}


def device(asked: Any) -> torch.device:
    """A device that can be used here, by its name. Raises RequestError for any other."""
    try:
        found = torch.device(asked)
        if found.type == "meta":
            raise RuntimeError("it holds no values")
        torch.empty(0, device=found)
    except TypeError:
        raise RequestError(f'device is {asked!r}; it must be a name such as "cpu" or "cuda:0".') from None
    except (RuntimeError, AssertionError) as problem:
        reason = str(problem).splitlines()[0].rstrip(".")
        raise RequestError(f"device {str(asked)!r} cannot be used here: {reason}.") from None
    return found


def use_threads(count: int | None) -> None:
    """So many of the processor's from now on, of all that runs in torch; None leaves them as they are."""
    if count is not None:
        torch.set_num_threads(count)


def fill(
    files: Files, places: WeightMap, dtype: str, device: str, progress: Progress | None = None
) -> Transformer:
    """The model with every parameter from the files, which were checked to hold them."""
    kind, spec = getattr(torch, dtype), files.description.model
    need, how = spec.parameters() * kind.itemsize, f"as {dtype}"
    way_on = 'load it with dtype="bfloat16", or choose' if kind.itemsize > 2 else "choose"
    check_memory(files.name, need, how, device, way_on)
    # built once the files have proven the sizes: a configuration alone could ask for anything
    with torch.device("meta"):
        model = Transformer(spec).requires_grad_(False)
    state = {}
    for done, ours in enumerate(places.ours, 1):
        try:
            state[ours] = _converted(files, places, ours, kind, device)
        except (MemoryError, RuntimeError) as problem:
            if "memory" not in str(problem) and not isinstance(problem, MemoryError):
                raise
            raise too_large(files.name, need, how, None, way_on) from None
        if progress is not None:
            progress(done, len(places.ours))
    model.load_state_dict(state, strict=False, assign=True)
    tie(model, spec)
    return model.eval()


def _converted(files: Files, places: WeightMap, ours: str, dtype: torch.dtype, device: str) -> torch.Tensor:
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
    places, values = loaded.places, dict[str, np.ndarray]()
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
