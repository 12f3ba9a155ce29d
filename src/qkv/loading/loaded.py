"""A source as it was loaded: its files, checked, and what runs the model in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.checkpoints import StoredTensor
from qkv.errors import RequestError, UnsupportedError
from qkv.families import Description
from qkv.families.weights import WeightMap
from qkv.generation_config import Bounds
from qkv.loading.checks import carried, checked, weight_map
from qkv.loading.files import Files, entries, opened
from qkv.loading.parameters import Parameters, Progress
from qkv.loading.room import check_memory, too_large
from qkv.runtime.choice import Choice, choose, machine, otherwise, require_torch
from qkv.runtime.compression import Compression, compression, described
from qkv.runtime.machine import Machine
from qkv.sources import find
from qkv.spec import Model as Spec, Tokens
from qkv.text import Tokenizer

if TYPE_CHECKING:
    import torch

    from qkv.nn import Transformer

SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}


@dataclass(eq=False)
class Loaded:
    """What a source holds, and what runs it.

    `choice` says what generates: torch, or a machine that runs the model's programs. `dtype` and
    `device` are those of the torch modules, which are made when they are first needed. `threads` None
    are as many as do good. `ignore` are the keys and tensors that were done without.
    """

    files: Files
    choice: Choice
    dtype: str = "float32"
    device: str = "cpu"
    ignore: tuple[str, ...] = ()
    threads: int | None = None
    kv: str | None = None  # how the native runtime keeps keys and values; None: as the weights call for
    cache: int | None = None  # bytes that they may take; None: what is free
    compress: Compression | None = None  # which of them are kept
    serving: dict[str, Any] = field(default_factory=dict)  # the engine's schedulers and grammars

    @property
    def spec(self) -> Spec:
        return self.files.description.model

    @property
    def description(self) -> Description:
        return self.files.description

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.files.tokenizer

    @property
    def context(self) -> int | None:
        return self.files.description.context

    @property
    def eos_ids(self) -> frozenset[int]:
        return self.files.ends

    @property
    def source(self) -> Path:
        return self.files.path

    @property
    def config(self) -> Mapping[str, Any]:
        return self.files.config

    @property
    def generation(self) -> Mapping[str, Any]:
        return self.files.generation

    @property
    def vocab(self) -> int:
        """How many token ids the model knows."""
        tokens = self.spec.trunk.input
        return tokens.vocab if isinstance(tokens, Tokens) else 0

    @cached_property
    def places(self) -> WeightMap:
        """Where the parameters stand in the files."""
        return weight_map(self.description)

    @cached_property
    def carried(self) -> dict[str, StoredTensor]:
        """Tensors that hold no parameter, to be saved with the model again."""
        return carried(self.files, self.ignore)

    @cached_property
    def model(self) -> Transformer:
        """The torch modules, with the files' values. UnsupportedError where torch is not installed."""
        return self._network()

    @cached_property
    def machine(self) -> Machine:
        """What runs the programs."""
        return self._machine()

    def prepare(self, progress: Progress | None = None) -> None:
        """Makes what generates, now; the other is made if it is needed."""
        if self.choice.runtime == "torch":
            self.model = self._network(progress)
        else:
            self.machine = self._machine(progress)

    def _network(self, progress: Progress | None = None) -> Transformer:
        require_torch("This")
        from qkv.loading import network

        network.use_threads(self.threads)
        return network.fill(self.files, self.places, self.dtype, self.device, progress)

    def _machine(self, progress: Progress | None = None) -> Machine:
        name, on = self.files.name, f"on the {self.choice.runtime} runtime"
        decoded = self.choice.runtime == "numpy"  # to fp32; the native runtime keeps what is stored
        need = self.spec.parameters() * 4 if decoded else sum(t.nbytes for t in self.files.tensors.values())
        check_memory(name, need, on, "cpu")
        try:
            weights = Parameters(self.files, self.places, progress)
            return machine(self.choice, weights, self.threads, self.kv)
        except MemoryError:
            raise too_large(name, need, on, None) from None


def load(
    source: str | Path,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    ignore: str | Iterable[str] | None = (),
    progress: Progress | None = None,
    runtime: str | None = None,
    threads: int | None = None,
    kv: str | None = None,
    cache: int | None = None,
    compress: str | Compression | None = None,
) -> Loaded:
    """Reads a model and its weights.

    `source`: a folder in Hugging Face layout (or its config.json, or one weight file in it), a .gguf
    file, a hub name ("org/name"), or a packaged model ("smollm2"). `runtime` is what generates:
    "native", "torch" or "numpy"; None takes the best there is (see `qkv.runtime.choice.choose`).
    `kv` is how the native runtime keeps keys and values: "f32", "bf16" or "int8"; `cache` how many
    bytes they may take in all; `compress` keeps only some of them: see `qkv.runtime.compression`.
    `dtype` None follows the file (quantised weights become float32 in
    torch); a dtype, or a device other than "cpu", is torch's.

    `ignore` names what to do without, one name or several: keys of the configuration or of the
    generation configuration, at any level, or tensors, by name or pattern ("visual.*"). Each must
    match something that can be left out, so that a slip of the pen is not taken for a change of the
    model; `model_type` and `architectures` say which model it is and cannot be ignored.

    Raises a QkvError: of the source, its configuration, its weights or its tokenizer, of a runtime
    that cannot be had, or for more memory than is free. Nothing is half loaded.
    """
    for name, value in (("threads", threads), ("cache", cache)):
        if value is not None and not Bounds(Integral, 1).hold(value):
            raise RequestError(f"{name} is {value!r}; it must be {Bounds(Integral, 1)}.")
    path, ignored, where = find(source), entries(ignore), _device(device)
    files = opened(path, ignored)
    kind = dtype_of(dtype, files.tensors)
    places = checked(files, ignored)
    policy = compression(compress)
    if policy is not None:
        model = described(files.description.model, policy)
        files = replace(files, description=replace(files.description, model=model))
    choice = choose(
        runtime, files.description.model, where, dtype, weighs=policy is not None and policy.weighs
    )
    loaded = Loaded(files, choice, kind, where, ignored, threads, kv, cache, policy)
    loaded.places = places
    if kv is not None and choice.runtime != "native":
        raise RequestError(f"kv is of the native runtime, and this model is run by {choice.runtime}.")
    try:
        loaded.prepare(progress)
    except UnsupportedError as problem:
        loaded.choice = otherwise(choice, problem)
        loaded.prepare(progress)
    return loaded


def _device(asked: torch.device | str) -> str:
    """Its name. Only the processor's needs no torch to be known."""
    if isinstance(asked, str) and asked == "cpu":
        return asked
    require_torch(f"device {asked!r}")
    from qkv.loading import network

    return str(network.device(asked))


def dtype_of(asked: torch.dtype | str | None, tensors: Mapping[str, StoredTensor]) -> str:
    """The name of what was asked for, else of the type most of the file is stored in."""
    if asked is not None:
        name = str(asked).removeprefix("torch.")
        name = SHORT.get(name, name)
        if name not in STORED:
            raise RequestError(f"dtype {asked!r} is not known (float32, bfloat16, float16, float64).")
        return name
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        sizes[tensor.format] = sizes.get(tensor.format, 0) + tensor.nbytes
    most = max(sizes, key=sizes.__getitem__, default="")
    return next((name for name, stored in STORED.items() if stored == most), "float32")
