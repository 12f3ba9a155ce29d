"""What `qkv.load` gives: a model one can call, generate with, tap and save."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

import numpy as np

from qkv import engine, loading
from qkv.checkpoints import write_shards
from qkv.engine import Completion, Options, Request
from qkv.engine.requests import ONE_ANSWER
from qkv.errors import RequestError, TokenizerError, UnsupportedError
from qkv.generation_config import NAME as GENERATION
from qkv.runtime.choice import Choice, require_torch
from qkv.runtime.compression import Compression
from qkv.spec import Language, Model as Spec, MultiToken, PooledEmbedding
from qkv.text import Tokenizer

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float, Int

    from qkv.engine import Engine
    from qkv.nn import Layout, Tap, Taps, Transformer

Prompt: TypeAlias = "str | Sequence[int] | np.ndarray | torch.Tensor"


def load(
    source: str | Path = "smollm2",
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    ignore: str | Iterable[str] | None = (),
    progress: loading.Progress | None = None,
    runtime: str | None = None,
    threads: int | None = None,
    kv: str | None = None,
    cache: int | None = None,
    compress: str | Compression | None = None,
) -> Model:
    """A model from a folder in Hugging Face layout, a .gguf file, a hub name, or a packaged name.

    `runtime` is what generates: "native", "torch" or "numpy"; None, where QKV_RUNTIME in the
    environment names none either, is the fastest there is here. A `dtype`, and a `device` other than
    "cpu", are torch's; `dtype` None follows the file, and quantised weights become float32 there.
    `threads` None are as many as do good. `kv` is how the native runtime keeps keys and values: "f32",
    "bf16" or "int8", half the memory of bf16; `cache` how many bytes they may take in all, else what is
    free. `compress` keeps fewer of them: "sinks:1024" the first and the latest tokens, 1,024 in all;
    "h2o:1024" and "snapkv:1024" those that got most attention, which only torch can tell. `ignore`
    names configuration keys or patterns of tensors to do without; each must match something. Raises a
    `qkv.QkvError` whose sentence says what is wrong and what would be right.
    """
    return Model(loading.load(source, dtype, device, ignore, progress, runtime, threads, kv, cache, compress))


class Model:
    """A loaded model. `spec` describes it; `tokenizer` is None where its files have none.

    Generating needs torch only where `runtime` says so. Calling the model, taps, `embed`, features
    and `save` do: its modules are made, from the same files, when they are first needed.
    """

    def __init__(self, loaded: loading.Loaded):
        self.loaded = loaded
        self.spec: Spec = loaded.spec
        self.tokenizer: Tokenizer | None = loaded.tokenizer
        self.context = loaded.context
        self._tapped: Tap | None = None

    def __repr__(self) -> str:
        kind = self.loaded.dtype if self.runtime == "torch" else f"run by {self.runtime}"
        return f"<{self.loaded.source.name}: {self.spec.parameters():,} parameters, {kind}>"

    @property
    def runtime(self) -> str:
        """What generates: "native", "torch" or "numpy". A tap or features make it torch for a while."""
        return self.loaded.choice.runtime

    @property
    def tapped(self) -> Tap | None:
        """What reads and replaces values now: that of the `tap` blocks that run, the outermost asked first.

        None outside of them. Calls and generating ask it of every value; what runs the `network` by
        itself hands it over as `network(tokens, tap=...)`, or refuses while there is one.
        """
        return self._tapped

    @property
    def network(self) -> Transformer:
        """The torch modules. Editing them changes what calls give, and generating where that is torch's."""
        return self.loaded.model

    @property
    def dtype(self) -> torch.dtype:
        """Of the torch modules."""
        return next(self.network.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def __call__(
        self,
        tokens: Int[torch.Tensor, "batch length"] | None = None,
        source: Int[torch.Tensor, "batch source"] | None = None,
        *,
        types: Int[torch.Tensor, "batch length"] | None = None,
        features: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
        layout: Layout | None = None,
    ) -> Float[torch.Tensor, "batch length vocab"] | Float[torch.Tensor, "batch length width"]:
        """Logits where the checkpoint has a language head, else what its head gives, or hidden states.

        `source` are the tokens that an encoder reads, `types` those of the tokens (BERT's segments),
        `features` images or audio frames: see `qkv.nn.Transformer`. Models refuse what they have no
        use for. `layout` defaults to unpadded rows.
        """
        network = self.network
        given = {
            name: _ids(name, ids, self.device)
            for name, ids in (("tokens", tokens), ("source", source), ("types", types))
        }
        from qkv.nn import Layout, NoTap

        if layout is not None and not isinstance(layout, Layout):
            raise RequestError(f"layout must be a Layout or None, not of type {type(layout).__name__}.")
        features = _placed(features, self.device)
        tap = NoTap() if self.tapped is None else self.tapped
        return network(**given, features=features, layout=layout, tap=tap)

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        features: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
        **options: Unpack[Options],
    ) -> Completion | list[Completion] | list[list[Completion]]:
        """Continues a prompt (text or token ids), or each of a list of prompts as one batch.

        Rows of an array (batch, length) are prompts of a batch. An encoder-decoder reads the prompt
        and answers it. `features` are the images (images, channels, height, across) whose rows take
        their tokens' places in a prompt, or the audio (1, channels, frames) that it goes on from; of
        a list of prompts, a list of these. Greedy unless the model's generation config or the
        arguments say otherwise:

        - max_new_tokens: None is the generation config's, else 256, as far as the context allows.
        - stop: texts before which an answer stops; ignore_eos: end tokens do not stop it.
        - temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty,
          logit_bias, seed: see `qkv.engine.Sampling`. A bias may name a token by its text.
        - n: so many samples of each prompt, which is read once; sample i is the same whatever n.
        - beams, length_penalty, early_stopping: see `qkv.engine.BeamSearch`; n of its answers, best
          first, fewer where the search finds no more.
        - speculate: "ngram", or a smaller model of the same vocabulary, guesses what comes next. The text
          is the same as without, and comes sooner where guesses are right.
        - logprobs: "raw" (default) or "processed"; top_logprobs: see `qkv.engine.Completion`.
        - json_schema (a dict, its text, or True for any object), regex or choice (texts): what the whole
          answer must be, unless a stop or the limit cuts it: see `qkv.engine.constraints`.

        With n above 1 each prompt's answers are a list. Raises RequestError, or CapacityError for a
        cache that does not fit, before anything runs; RequestError also where the model's numbers
        fail and there is one answer. Of several, those that fail have an `error`.
        """
        prompts, single = _prompts(prompt)
        beside = [features] if single else _each(features, len(prompts))
        requests = [self.request(p, f, **options) for p, f in zip(prompts, beside, strict=True)]
        if not requests:
            raise RequestError("There is no prompt to continue.")
        found: dict[int, Completion] = {}
        for number, _, completion in engine.stream(self.loaded, requests, lambda: self.tapped):
            found[number] = completion
        n = requests[0].n
        if n == 1:
            if single:
                _raise_error(found[0])
            return found[0] if single else [found[row] for row in range(len(requests))]
        each = [[found[i] for i in range(row * n, row * n + n) if i in found] for row in range(len(requests))]
        return each[0] if single else each

    def stream(
        self,
        prompt: Prompt,
        *,
        features: torch.Tensor | None = None,
        progress: Callable[[int, int], None] | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """One answer to one prompt, piece by piece: iterate for text, then look at `.completion`.

        What cannot be served is refused here; nothing runs before the first piece is asked for.
        `progress` is told how much of the prompt is read, and of how much. A beam search gives its
        text in one piece at its end.
        """
        if options.get("n") not in (None, 1):
            raise RequestError(ONE_ANSWER)
        options["n"] = 1
        request = self.request(prompt, features, **options)
        return Stream(engine.stream(self.loaded, [request], lambda: self.tapped, progress), request)

    def engine(self) -> Engine:
        """Serves many requests at once, of event loops and of threads: see `qkv.engine.Engine`.

            async with model.engine() as engine:
                print(await engine.generate("The capital of France is"))

        The model may be used beside it as before.
        """
        return engine.Engine(self.loaded, self.request, lambda: self.tapped)

    def request(
        self,
        prompt: Prompt,
        features: Any = None,
        **options: Unpack[Options],
    ) -> Request:
        """A prompt and its arguments as the engine takes them."""
        if not isinstance(self.spec.head, Language | MultiToken):
            raise UnsupportedError("This model has no language head, so it cannot generate.")
        if self.spec.decoder is None:
            raise UnsupportedError("This model is an encoder, which fills in a text and cannot generate one.")
        drafter = options.get("speculate")
        if isinstance(drafter, Model):
            options["speculate"] = drafter.loaded
        ids = tuple(self.encode(prompt)) if isinstance(prompt, str) else _whole(prompt)
        return engine.request(ids, self.loaded, options, features)

    def encode(self, text: str) -> list[int]:
        """The prompt's tokens, with the beginning token where the model's files ask for one."""
        if self.tokenizer is None:
            raise TokenizerError("This source has no tokenizer: give token ids.")
        return self.tokenizer.encode(text)

    def embed(self, texts: str | Sequence[str]) -> Float[torch.Tensor, "texts width"]:
        """One vector for each text, of a model whose files say how it embeds, as sentence-transformers' do.

        The texts run as one batch. Whole texts are read: raises RequestError where one does not fit
        into the model's context, and UnsupportedError for a model that does not embed.
        """
        if not isinstance(self.spec.head, PooledEmbedding):
            raise UnsupportedError(
                "This model's files do not say how it embeds a text: call the model on tokens, or tap "
                '"final", for the states of each token.'
            )
        rows = [self.encode(text) for text in ([texts] if isinstance(texts, str) else texts)]
        longest = max(map(len, rows), default=0)
        if not longest:
            raise RequestError("There is no text to embed.")
        if self.context is not None and longest > self.context:
            raise RequestError(
                f"A text has {longest:,} tokens and this model reads {self.context:,}: give it in parts."
            )
        device = self.device
        import torch

        from qkv.nn import Layout

        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
        there = torch.tensor([[i < len(row) for i in range(longest)] for row in rows], device=device)
        with torch.no_grad():
            return self(tokens, layout=Layout.padded(there))

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """A conversation as a prompt, by the model's own template. Contents cannot become control tokens."""
        if self.tokenizer is None:
            raise TokenizerError("This source has no tokenizer, so it cannot chat.")
        if isinstance(messages, str | Mapping) or not all(isinstance(m, Mapping) for m in messages):
            raise RequestError('A conversation is a list of messages: [{"role": "user", "content": "..."}].')
        return self.tokenizer.chat([dict(message) for message in messages])

    def use(self, backend: str) -> Model:
        """Makes attention run on "reference", "sdpa" (torch's fused kernel) or "flex" (torch's compiler).

        Each equals the reference, and from now on torch generates. Raises UnsupportedError, naming
        what a backend lacks of this model's attention, and then changes nothing.
        """
        network = self.network
        from qkv.nn.choice import named, use

        use(network, named(backend))
        self.loaded.choice = Choice("torch", f"attention runs on {backend}")
        return self

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
        require_torch("A tap")
        from qkv.nn import Taps, tap_names

        taps = Taps(names, tap_names(self.spec))
        outer = self._tapped
        self._tapped = taps if outer is None else _Nested(outer, taps)
        try:
            yield taps
        finally:
            self._tapped = outer

    def save(self, folder: str | Path) -> None:
        """Writes a folder in Hugging Face layout: weights, configuration and tokenizer, as they were read.

        What was ignored in loading is left out, so that the folder is this model. Shared tensors are
        stored once, in the type the model has now, in files of about 5 GB. Raises RequestError where the
        folder already holds weights or cannot be made.
        """
        if not self.loaded.config:
            raise UnsupportedError("Only models read from a Hugging Face folder can be saved so far.")
        require_torch("Saving a model")
        from qkv.loading.network import stored_tensors

        folder = Path(folder)
        if next(folder.glob("*.safetensors*"), None) is not None:
            raise RequestError(f"{folder} already holds weights: save to another folder.")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise RequestError(f"{folder} cannot be made a folder to save in: {problem.strerror}.") from None
        write_shards(folder, stored_tensors(self.loaded))
        source = self.loaded.source
        for path in ((source if source.is_dir() else source.parent) / name for name in _BESIDE):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
        config = {key: value for key, value in self.loaded.config.items() if key != "torch_dtype"}
        config["dtype"] = str(self.dtype).removeprefix("torch.")
        files = {"config.json": config, GENERATION: self.loaded.generation, **self.loaded.files.modules}
        for name, data in files.items():
            if data:
                (folder / name).parent.mkdir(exist_ok=True)
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
        _raise_error(self.completion)
        raise StopIteration

    def close(self) -> None:
        """Generates no more, and frees the memory that this took."""
        self._pieces.close()


def _raise_error(completion: Completion) -> None:
    if completion.error is not None:
        raise RequestError(completion.error)


class _Nested:
    """Taps within taps: the outer one is asked first."""

    def __init__(self, outer: Tap, inner: Tap):
        self.outer, self.inner = outer, inner

    def __call__(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return self.inner(name, self.outer(name, value))

    def wants(self, name: str) -> bool:
        return self.outer.wants(name) or self.inner.wants(name)

    def at(self, *names: str | int) -> Tap:
        return _Nested(self.outer.at(*names), self.inner.at(*names))


def _ids(name: str, ids: Any, device: torch.device) -> torch.Tensor | None:
    import torch

    if ids is None:
        return None
    whole = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    if not isinstance(ids, torch.Tensor) or ids.dtype not in whole:
        raise RequestError(f"{name.capitalize()} must be a tensor of whole numbers, (batch, length).")
    return ids.to(device, torch.long)


def _prompts(given: Any) -> tuple[list[Any], bool]:
    """One prompt or several, as a list, and whether it was one."""
    given = _plain(given)
    if isinstance(given, str):
        return [given], True
    rows = _items(given)
    if rows and not isinstance(_plain(rows[0]), str | Sequence):
        return [given], True
    return rows, False


def _each(features: Any, count: int) -> list[Any]:
    """Those of each prompt of a list."""
    if features is None:
        return [None] * count
    if not isinstance(features, list | tuple) or len(features) != count:
        raise RequestError(
            f"For a list of prompts features must be a list: {count:,}, one (or None) for each."
        )
    return list(features)


def _placed(features: Any, device: torch.device) -> Any:
    """Features, of one tower or of each, on a device."""
    if isinstance(features, list | tuple):
        return [_placed(one, device) for one in features]
    return features.to(device) if _is_tensor(features) else features


def _whole(prompt: Any) -> tuple[int, ...]:
    """Token ids of any integer type, as Python's; true and false are none."""
    tokens = [_plain(token) for token in _items(_plain(prompt))]
    if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in tokens):
        raise RequestError(_NO_PROMPT)
    return tuple(map(int, tokens))


def _plain(value: Any) -> Any:
    """Arrays of numpy and torch as Python's lists and numbers."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) or _is_tensor(value) else value


def _is_tensor(value: Any) -> bool:
    """Without importing torch: where nothing has, there is no tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _items(prompt: Any) -> list[Any]:
    # the bytes of a text are no token ids
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        raise RequestError(_NO_PROMPT)
    return list(prompt)


_NO_PROMPT = "A prompt must be text or token ids (whole numbers)."
