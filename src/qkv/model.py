"""What `qkv.load` gives: a model one can call, generate with, tap and save."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from jaxtyping import Float, Int

from qkv import engine, loading
from qkv.checkpoints import StoredTensor, write_safetensors
from qkv.engine import Asked, Completion, Request, Sampling
from qkv.errors import RequestError, TokenizerError, UnsupportedError
from qkv.generation_config import NAME as GENERATION
from qkv.nn import Layout, NoTap, Tap, Taps, tap_names
from qkv.spec import Language, Model as Spec
from qkv.text import Tokenizer

Prompt = str | Sequence[int] | np.ndarray | torch.Tensor


def load(
    source: str | Path = "smollm2",
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    ignore: str | Iterable[str] | None = (),
    progress: loading.Progress | None = None,
) -> Model:
    """A model from a folder in Hugging Face layout, a .gguf file, a hub name, or a packaged name.

    `dtype` None follows the file; quantised weights become float32. `ignore` names configuration
    keys or patterns of tensors to do without; each must match something. Raises a `qkv.QkvError`
    whose sentence says what is wrong and what would be right.
    """
    return Model(loading.load(source, dtype, device, ignore, progress))


class Model:
    """A loaded model. `spec` describes it; `tokenizer` is None where its files have none."""

    def __init__(self, loaded: loading.Loaded):
        self.loaded = loaded
        self.network = loaded.model
        self.spec: Spec = loaded.model.spec
        self.tokenizer: Tokenizer | None = loaded.tokenizer
        self.context = loaded.context
        self._tap: Tap = NoTap()

    def __repr__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"<{self.loaded.source.name}: {self.spec.parameters():,} parameters, {kind}>"

    @property
    def dtype(self) -> torch.dtype:
        return next(self.network.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def __call__(
        self,
        tokens: Int[torch.Tensor, "batch length"],
        source: Int[torch.Tensor, "batch source"] | None = None,
        *,
        types: Int[torch.Tensor, "batch length"] | None = None,
        features: torch.Tensor | None = None,
        layout: Layout | None = None,
    ) -> Float[torch.Tensor, "batch length vocab"] | Float[torch.Tensor, "batch length width"]:
        """Logits where the checkpoint has a language head, else hidden states.

        `source` is what cross-attention reads, `features` images or audio frames: models of this
        kind refuse what they have no use for. `layout` defaults to unpadded rows.
        """
        for name, given in (("source", source), ("features", features), ("types", types)):
            if given is not None:
                raise RequestError(f"This model has no use for {name}.")
        if not isinstance(tokens, torch.Tensor) or tokens.dtype not in _WHOLE:
            raise RequestError("Tokens must be a tensor of whole numbers, (batch, length).")
        if layout is not None and not isinstance(layout, Layout):
            raise RequestError(f"layout must be a Layout or None, not of type {type(layout).__name__}.")
        return self.network(tokens.to(self.device, torch.long), layout=layout, tap=self._tap)

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = False,
        **sampling: Unpack[Asked],
    ) -> Completion | list[Completion]:
        """Continues a prompt (text or token ids), or each of a list of prompts as one batch.

        Rows of an array (batch, length) are prompts of a batch. Greedy unless the model's generation
        config or the arguments say otherwise (see `qkv.engine.Sampling`). `max_new_tokens` None: the
        generation config's, else 256, as far as the context allows. Stops before any of the `stop`
        texts. Raises RequestError, or CapacityError for a cache that does not fit, before anything
        runs.
        """
        prompts, single = _prompts(prompt)
        requests = [self.request(p, max_new_tokens, stop, ignore_eos, sampling) for p in prompts]
        if not requests:
            raise RequestError("There is no prompt to continue.")
        found: dict[int, Completion] = {}
        for row, _, completion in engine.stream(self.loaded, requests, lambda: self._tap):
            found[row] = completion
        return found[0] if single else [found[row] for row in range(len(requests))]

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = False,
        progress: Callable[[int, int], None] | None = None,
        **sampling: Unpack[Asked],
    ) -> Stream:
        """The same for one prompt, piece by piece: iterate for text, then look at `.completion`.

        What cannot be served is refused here; nothing runs before the first piece is asked for.
        `progress` is told how much of the prompt is read, and of how much.
        """
        request = self.request(prompt, max_new_tokens, stop, ignore_eos, sampling)
        return Stream(engine.stream(self.loaded, [request], lambda: self._tap, progress), request)

    def request(
        self,
        prompt: Prompt,
        max_new_tokens: int | None,
        stop: str | Sequence[str] | None,
        ignore_eos: bool,
        sampling: Mapping[str, Any],
    ) -> Request:
        """A prompt and its arguments as the engine takes them."""
        if not isinstance(self.spec.head, Language):
            raise UnsupportedError("This model has no language head, so it cannot generate.")
        ids = tuple(self.encode(prompt)) if isinstance(prompt, str) else _whole(prompt)
        stops = () if stop is None else tuple(stop) if isinstance(stop, list | tuple) else (stop,)
        chosen = Sampling.from_defaults(self.loaded.generation, sampling)
        limit = engine.room(ids, self.loaded, max_new_tokens)
        return Request(ids, limit, chosen, stops, ignore_eos)

    def encode(self, text: str) -> list[int]:
        """The prompt's tokens, with the beginning token where the model's files ask for one."""
        if self.tokenizer is None:
            raise TokenizerError("This source has no tokenizer: give token ids.")
        return self.tokenizer.encode(text)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """A conversation as a prompt, by the model's own template. Contents cannot become control tokens."""
        if self.tokenizer is None:
            raise TokenizerError("This source has no tokenizer, so it cannot chat.")
        return self.tokenizer.chat([dict(message) for message in messages])

    @contextmanager
    def tap(self, names: str | Iterable[str] | Mapping[str, Any]) -> Iterator[Taps]:
        """Reads, and replaces, what flows through the model while the block runs.

            with model.tap(["layers.*.attention.weights"]) as seen:
                model(tokens)
            seen["layers.3.attention.weights"]           # (batch, heads, query, key)
            with model.tap({"layers.3.output": lambda x: 0 * x}):
                model(tokens)

        Blocks nest: the inner one sees what the outer one has replaced. Raises RequestError for a
        name the model does not have. Nothing stays after the block.
        """
        taps = Taps(names, tap_names(self.spec))
        outer, self._tap = self._tap, _Nested(self._tap, taps)
        try:
            yield taps
        finally:
            self._tap = outer

    def save(self, folder: str | Path) -> None:
        """Writes a folder in Hugging Face layout: weights, configuration and tokenizer, as they were read.

        What was ignored in loading is left out, so that the folder is this model. Shared tensors are
        stored once, in the type the model has now. Raises RequestError where the folder already holds
        weights.
        """
        if not self.loaded.config:
            raise UnsupportedError("Only models read from a Hugging Face folder can be saved so far.")
        folder = Path(folder)
        if next(folder.glob("*.safetensors*"), None) is not None:
            raise RequestError(f"{folder} already holds weights: save to another folder.")
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: _stored(name, tensor) for name, tensor in loading.checkpoint_names(self.loaded)}
        write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
        source = self.loaded.source
        for path in ((source if source.is_dir() else source.parent) / name for name in _BESIDE):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
        config = {key: value for key, value in self.loaded.config.items() if key != "torch_dtype"}
        config["dtype"] = str(self.dtype).removeprefix("torch.")
        for name, data in (("config.json", config), (GENERATION, self.loaded.generation)):
            if data:
                (folder / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


# what makes a folder of weights a whole model, beside the configurations
_BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


class Stream:
    """Text as it is generated. `completion` holds what there is so far; `close` ends it early."""

    def __init__(self, pieces: Generator[tuple[int, str, Completion], None, None], request: Request):
        self.completion = Completion(request.prompt)
        self._pieces = pieces

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        for _, text, completion in self._pieces:
            self.completion = completion
            if text:
                return text
        raise StopIteration

    def close(self) -> None:
        """Generates no more, and frees the memory that this took."""
        self._pieces.close()


class _Nested:
    """Taps within taps: the outer one is asked first."""

    def __init__(self, outer: Tap, inner: Tap):
        self.outer, self.inner = outer, inner

    def __call__(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return self.inner(name, self.outer(name, value))

    def at(self, *names: str | int) -> Tap:
        return _Nested(self.outer.at(*names), self.inner.at(*names))


_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _prompts(given: Any) -> tuple[list[Any], bool]:
    """One prompt or several, as a list, and whether it was one."""
    given = _plain(given)
    if isinstance(given, str):
        return [given], True
    rows = _items(given)
    if rows and not isinstance(_plain(rows[0]), str | Sequence):
        return [given], True
    return rows, False


def _whole(prompt: Any) -> tuple[int, ...]:
    """Token ids of any integer type, as Python's; true and false are none."""
    tokens = [_plain(token) for token in _items(_plain(prompt))]
    if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in tokens):
        raise RequestError(_NO_PROMPT)
    return tuple(map(int, tokens))


def _plain(value: Any) -> Any:
    """Arrays of numpy and torch as Python's lists and numbers."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic | torch.Tensor) else value


def _items(prompt: Any) -> list[Any]:
    # the bytes of a text are no token ids
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        raise RequestError(_NO_PROMPT)
    return list(prompt)


_NO_PROMPT = "A prompt must be text or token ids (whole numbers)."


def _stored(name: str, tensor: torch.Tensor) -> StoredTensor:
    formats = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}
    raw = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(-1)
    return StoredTensor(name, tuple(tensor.shape), formats[tensor.dtype], np.ascontiguousarray(raw))
