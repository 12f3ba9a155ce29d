"""What is asked for and what comes of it; what cannot be served is refused here, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

from qkv.engine.beams import BeamSearch
from qkv.engine.constraints import Constraint, Grammars, Matcher, constraint
from qkv.engine.logprobs import Kind
from qkv.engine.sampling import GREEDY, Asked, Sampling
from qkv.errors import ConfigError, RequestError, TokenizerError
from qkv.generation_config import NAME as GENERATION, SAMPLES, Bounds, token_ids as forced_ids
from qkv.loading import Loaded
from qkv.spec import Language, Learned, Model, Stack, Tokens
from qkv.text import IncrementalDecoder, StopStrings, Tokenizer

if TYPE_CHECKING:
    import torch


ONE_ANSWER = "A stream is of one answer: leave n out, or generate without a stream."
Speculate = Literal["ngram"] | Loaded  # where guesses of the next tokens come from


@dataclass(frozen=True)
class Request:
    """What to continue and when to stop. An encoder of tokens reads the prompt; another, the features.

    `n` answers are wanted: samples, or with `beams` the best of the search. `logprobs` says which
    are reported, and `top_logprobs` of how many of the likeliest tokens beside the chosen one.
    `speculate` makes guesses of what comes next, which change no answer: "ngram" from the text itself,
    or a smaller model of the same vocabulary.
    An answer's text is of its `constraint`, where there is one, unless a stop or the limit cuts it.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    beams: BeamSearch | None = None
    logprobs: Kind = "raw"
    top_logprobs: int = 0
    features: torch.Tensor | None = field(default=None, compare=False)
    speculate: Speculate | None = None
    constraint: Constraint | None = None

    @property
    def rows(self) -> int:
        """Rows of the batch that this takes once the prompt is read."""
        return self.n if self.beams is None else self.beams.width


class Options(Asked, total=False):
    """What may be asked for beside the prompt; None, or nothing, leaves the model's default."""

    max_new_tokens: int | None
    stop: str | Sequence[str] | None
    ignore_eos: bool
    n: int | None
    beams: int | None
    length_penalty: float | None
    early_stopping: bool | Literal["never"] | None
    logprobs: Kind | None
    top_logprobs: int | None
    speculate: Speculate | None
    json_schema: Mapping[str, Any] | str | Literal[True] | None
    regex: str | None
    choice: Sequence[str] | None


@dataclass
class Completion:
    """One answer. `finish_reason` is "stop" (an end token or a stop text), "length", or "error".

    `tokens` are all that were chosen, an end token included; `text` goes on exactly where the
    prompt's ends. `logprobs` are theirs: the model's own, unless "processed" ones were asked for;
    `top_logprobs` the likeliest tokens at each place and theirs. `score` is that of a beam search.
    `error` says why an answer ended early; the others of its batch are not touched by it. Where it was
    speculated, so many tokens were `guessed`, and so many of those were `right`.
    """

    prompt: tuple[int, ...]
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: str | None = None
    score: float | None = None
    error: str | None = None
    guessed: int = 0
    right: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def __str__(self) -> str:
        return self.text

    @property
    def prefill_speed(self) -> float:
        """Prompt tokens a second."""
        return len(self.prompt) / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_speed(self) -> float:
        """Tokens a second after the first, which the prompt's pass gives."""
        return (len(self.tokens) - 1) / self.decode_seconds if self.decode_seconds else 0.0


def request(
    prompt: tuple[int, ...], loaded: Loaded, asked: Mapping[str, Any], features: torch.Tensor | None = None
) -> Request:
    """A prompt and what is asked for, over what the model's files say, over the defaults."""
    known = Options.__annotations__.keys()
    for name in asked:
        if name not in known:
            raise RequestError(f"There is no argument {name!r} ({', '.join(sorted(known))}).")
    given, files = {name: value for name, value in asked.items() if value is not None}, loaded.generation
    n = given.get("n", files.get("num_return_sequences") or 1)
    beams = _beams(given, files)
    sampled = {name: value for name, value in given.items() if name in Asked.__annotations__}
    if "logit_bias" in sampled:
        sampled["logit_bias"] = token_ids(sampled["logit_bias"], loaded.tokenizer)
    if beams is not None:
        drawn = [name for name, value in sampled.items() if name not in {*GREEDY, "seed"} and value != 0]
        if drawn:
            raise RequestError(
                f"{drawn[0]} is for sampling, and a beam search draws nothing: leave it out, or give beams=1."
            )
        sampled["temperature"] = 0.0
    several = Bounds(Integral, 2).hold(n) and beams is None
    stop = given.get("stop", ())
    return Request(
        prompt,
        room(prompt, loaded, given.get("max_new_tokens")),
        Sampling.from_defaults(files, sampled, several),
        tuple(stop) if isinstance(stop, list | tuple) else (stop,),
        given.get("ignore_eos", False),
        n,
        beams,
        given.get("logprobs", "raw"),
        given.get("top_logprobs", 0),
        features,
        given.get("speculate"),
        constraint(given),
    )


def _beams(asked: Mapping[str, Any], files: Mapping[str, Any]) -> BeamSearch | None:
    """The search that is asked for, or that the files set; one beam is none."""
    settings = {name: asked.get(name, files.get(name)) for name in ("length_penalty", "early_stopping")}
    width = asked.get("beams", files.get("num_beams"))
    if width is None or (width == 1 and not isinstance(width, bool)):
        for name in settings:
            if name in asked:
                raise RequestError(f"{name} is for a beam search: give beams, of at least 2, as well.")
        return None
    return BeamSearch(width, **{name: value for name, value in settings.items() if value is not None})


def token_ids(bias: Any, tokenizer: Tokenizer | None) -> Any:
    """A logit_bias with its texts, which must be of exactly one token, as ids."""
    if not isinstance(bias, Mapping):
        return bias  # refused where its numbers are checked
    found: dict[Any, Any] = {}
    for name, value in bias.items():
        token = _token_of(name, tokenizer) if isinstance(name, str) else name
        if token in found:
            raise RequestError(f"logit_bias names token {token} twice.")
        found[token] = value
    return found


def _token_of(text: str, tokenizer: Tokenizer | None) -> int:
    if tokenizer is None:
        raise RequestError(f"logit_bias names {text!r}, and this source has no tokenizer: give token ids.")
    ids = tokenizer.encode(text, bos=False, eos=False)
    if len(ids) != 1 or tokenizer.decode(ids, skip_special=False) != text:
        parts = ", ".join(repr(tokenizer.decode([token], skip_special=False)) for token in ids)
        raise RequestError(f"logit_bias names {text!r}, which is no single token (but {parts or 'none'}).")
    return ids[0]


def reads_prompt(spec: Model) -> bool:
    """Whether an encoder reads the prompt; else the prompt is what goes on."""
    return spec.encoder is not None and isinstance(spec.encoder.input, Tokens)


def start_token(loaded: Loaded) -> int | None:
    """What the decoder starts with where an encoder reads the prompt; else None."""
    if not reads_prompt(loaded.spec):
        return None
    for name in ("decoder_start_token_id", "bos_token_id"):
        for settings in (loaded.generation, loaded.config):
            token = settings.get(name)
            if token is not None:
                if not Bounds(Integral, 0, loaded.vocab - 1).hold(token):
                    raise ConfigError(f"{name} is {token!r}; it must be a token id below {loaded.vocab:,}.")
                return int(token)
    raise RequestError(
        "The model's files name no decoder_start_token_id, which the decoder of this model starts with."
    )


def check(request: Request, loaded: Loaded) -> None:
    """Raises RequestError, with the numbers, for what cannot be served."""
    _check_tokens(request, loaded)
    more = request.max_new_tokens
    if not Bounds(Integral, 1).hold(more):
        raise RequestError(f"max_new_tokens is {more!r}; it must be a whole number of at least 1.")
    _check_lengths(request, loaded)
    StopStrings(request.stop)  # refuses what is no text
    if request.stop and loaded.tokenizer is None:
        raise RequestError("Stop texts need a tokenizer, and this source has none.")
    if not isinstance(request.ignore_eos, bool):
        raise RequestError(f"ignore_eos is {request.ignore_eos!r}; it must be true or false.")
    _check_answers(request, loaded)
    _check_forced(loaded)
    _check_constraint(request, loaded)


def _check_tokens(request: Request, loaded: Loaded) -> None:
    if not request.prompt:
        raise RequestError("The prompt is empty: give at least one token.")
    read = loaded.spec.encoder
    vocab = read.input.vocab if read is not None and isinstance(read.input, Tokens) else loaded.vocab
    for place, token in enumerate(request.prompt):
        if not 0 <= token < vocab:
            raise RequestError(
                f"Token {token}, at place {place} of the prompt, is outside the vocabulary of {vocab:,}."
            )


def _check_lengths(request: Request, loaded: Loaded) -> None:
    size, more, spec = len(request.prompt), request.max_new_tokens, loaded.spec
    if spec.encoder is None or not reads_prompt(spec):
        if loaded.context is not None and size + more > loaded.context:
            raise RequestError(
                f"This request needs {size + more:,} tokens ({size:,} of prompt, {more:,} new) and the "
                f"context holds {loaded.context:,}: ask for fewer, or shorten the prompt."
            )
        return
    most, answer = _table(spec.encoder), _table(spec.trunk)
    if most is not None and size > most:
        raise RequestError(f"The prompt has {size:,} tokens and the encoder reads {most:,}: shorten it.")
    if answer is not None and 1 + more > answer:
        raise RequestError(
            f"This request needs {1 + more:,} tokens of the decoder (its start and {more:,} new), which "
            f"has room for {answer:,}: ask for fewer."
        )


def _check_answers(request: Request, loaded: Loaded) -> None:
    n, beams = request.n, request.beams
    if not SAMPLES.hold(n):
        raise RequestError(f"n is {n!r}; it must be {SAMPLES}.")
    if beams is not None and n > beams.width:
        raise RequestError(f"n is {n} and beams {beams.width}: a search gives at most as many as its beams.")
    if request.logprobs not in ("raw", "processed"):
        raise RequestError(f'logprobs is {request.logprobs!r}; it must be "raw" or "processed".')
    _check_drafter(request.speculate, loaded)
    vocab = _answered(loaded)
    if not Bounds(Integral, 0, vocab).hold(request.top_logprobs):
        raise RequestError(
            f"top_logprobs is {request.top_logprobs!r}; it must be a whole number from 0 to {vocab:,}, "
            "the size of the vocabulary."
        )
    for token in request.sampling.logit_bias:
        if token >= vocab:
            raise RequestError(f"logit_bias names token {token}, outside the vocabulary of {vocab:,}.")


def _check_drafter(drafter: Speculate | None, loaded: Loaded) -> None:
    if drafter is None or drafter == "ngram":
        return
    if not isinstance(drafter, Loaded):
        raise RequestError(f'speculate is {drafter!r}; it must be "ngram", or a loaded model.')
    if drafter is loaded:
        raise RequestError("A model cannot draft for itself: load a smaller one.")
    if reads_prompt(drafter.spec) or drafter.spec.features is not None:
        raise RequestError("A model that drafts reads and writes tokens alone, and this one does not.")
    ours, theirs = _answered(loaded), _answered(drafter)
    same = ours == theirs and (loaded.tokenizer is None) == (drafter.tokenizer is None)
    if same and loaded.tokenizer is not None and drafter.tokenizer is not None:
        same = loaded.tokenizer.encode(_SAMPLE) == drafter.tokenizer.encode(_SAMPLE)
    if not same:
        raise RequestError(
            f"A model that drafts must have the vocabulary of the one it drafts for ({ours:,} tokens, not "
            f"another {theirs:,})."
        )


_SAMPLE = "It's 27 °C — naïve words, 数字 and\n\tdef code(x): return x[1:] # ..."


def _check_forced(loaded: Loaded) -> None:
    """Raises ConfigError for a token that the files force and the model does not have."""
    vocab = _answered(loaded)
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        for token in forced_ids(loaded.generation, name):
            if token >= vocab:
                raise ConfigError(
                    f"{GENERATION}: {name} is {token}; it must be a token id below {vocab:,}. "
                    f'Pass ignore=("{name}",) to load without it.'
                )


def _check_constraint(request: Request, loaded: Loaded) -> None:
    """Makes the grammar, which is kept for the answers."""
    if request.constraint is not None:
        if request.ignore_eos:
            raise RequestError("ignore_eos has an answer go on where its constraint ends it: leave one out.")
        matcher(request, loaded, decoder(request, loaded))


def before(request: Request, loaded: Loaded) -> tuple[int, ...]:
    """The tokens that the answer goes on from: the prompt, or the start of an encoder-decoder's."""
    start = start_token(loaded)
    return request.prompt if start is None else (start,)


def decoder(request: Request, loaded: Loaded) -> IncrementalDecoder | None:
    """What spells an answer, after what it goes on from."""
    if loaded.tokenizer is None:
        return None
    found = loaded.tokenizer.stream()
    for token in before(request, loaded):
        spell(found, token)
    return found


def spell(decoder: IncrementalDecoder | None, token: int) -> str:
    """The text a token completes: none where the model has more ids than its tokenizer has texts."""
    try:
        return decoder.push(token) if decoder else ""
    except TokenizerError:
        return ""


def matcher(request: Request, loaded: Loaded, decoder: IncrementalDecoder | None) -> Matcher | None:
    """What holds an answer to its constraint; None without one."""
    if request.constraint is None:
        return None
    return Grammars.of(loaded, _answered(loaded)).begin(request.constraint, decoder)


def _answered(loaded: Loaded) -> int:
    """How many tokens the head chooses from."""
    head = loaded.spec.head
    return head.vocab if isinstance(head, Language) else loaded.vocab


def _table(stack: Stack) -> int | None:
    """How many positions a stack has rows for; None where they are computed."""
    position = stack.input.position if isinstance(stack.input, Tokens) else None
    return position.rows - position.offset if isinstance(position, Learned) else None


def room(prompt: Sequence[int], loaded: Loaded, wanted: int | None, default: int = 256) -> int:
    """How many tokens to generate: what was asked, or what the model's files say, or the default.

    The latter two as far as the context allows; the default also as far as a `max_length` of the
    files, which counts the prompt (of an encoder-decoder: the start), does.
    """
    if wanted is not None:
        return wanted
    spec, own = loaded.spec, loaded.generation.get("max_new_tokens")
    size, most = (1, _table(spec.trunk)) if reads_prompt(spec) else (len(prompt), loaded.context)
    if most is not None and size >= most:
        raise RequestError(f"The prompt has {size:,} tokens and the context holds {most:,}: shorten it.")
    limits = [own or default] + ([] if most is None else [most - size])
    whole = loaded.generation.get("max_length") if own is None else None
    if whole is not None and size >= whole:
        raise RequestError(
            f"The prompt has {size:,} tokens and the model's max_length is {whole:,}: "
            "shorten it, or give max_new_tokens."
        )
    return min(limits if whole is None else [*limits, whole - size])
