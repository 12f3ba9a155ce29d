"""What an answer's text must be: of a JSON schema, a regular expression, or one of some texts.

Of each place's tokens only those are left with which the text can still become such a one (Willard and
Louf 2023, "Efficient guided generation"). The grammars are llguidance's, an extra.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from qkv.engine import schemas
from qkv.errors import RequestError, UnsupportedError
from qkv.loading import Loaded
from qkv.text import IncrementalDecoder, Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Kind = Literal["json_schema", "regex", "choice"]

MOST_REGEX = 10_000  # characters
MOST_GRAMMARS = 16  # kept; one that is hard to follow takes some 20 MB
MOST_STATES = 50_000  # of a grammar's lexer, each a few hundred bytes
# between the parts of a JSON text: without a bound, small models write spaces for ever
SPACE = r" |\n{1,2}[ \t]{0,20}"
# the tokens are then the model's choice; else each forced text is written as the grammar's maker would
HEAD = '%llguidance {"no_forcing": true}\nstart: '


@dataclass(frozen=True)
class Constraint:
    """What the whole text of an answer must be.

    `text` is the schema as JSON, the regular expression (Rust's syntax, Unicode classes, the whole text
    matches), or the texts to choose from as a JSON list.
    """

    kind: Kind
    text: str


def constraint(asked: Mapping[str, Any]) -> Constraint | None:
    """From the arguments `json_schema`, `regex` and `choice`, one at most; None without any.

    Raises RequestError, with what would be right, for what no grammar can be made of.
    """
    given = {name: asked[name] for name in _TEXTS if asked.get(name) is not None}
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)} are given, and an answer follows one of them: choose one.")
    for name, value in given.items():
        return Constraint(name, _TEXTS[name](value))
    return None


def _schema_text(given: Any) -> str:
    return schemas.written(schemas.parsed(given))


def _regex_text(given: Any) -> str:
    if not isinstance(given, str) or not given:
        raise RequestError("regex must be a text that is not empty.")
    if len(given) > MOST_REGEX:
        raise RequestError(f"regex has {len(given):,} characters; {MOST_REGEX:,} are the most.")
    if (len(given) - len(given.rstrip("\\"))) % 2:
        raise RequestError("regex ends in a lone backslash.")
    schemas.check_repeats(given, "regex")
    _check_unicode("regex", given)
    return given


def _choice_text(given: Any) -> str:
    texts = list(given) if isinstance(given, list | tuple) else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise RequestError("choice must be a list of texts, none of them empty.")
    size = sum(map(len, texts))
    if size > schemas.MOST_CHARACTERS:
        raise RequestError(f"choice has {size:,} characters; {schemas.MOST_CHARACTERS:,} are the most.")
    _check_unicode("choice", "".join(texts))
    return json.dumps(texts)


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} holds half a character (a lone surrogate).") from None


_TEXTS: dict[Kind, Any] = {"json_schema": _schema_text, "regex": _regex_text, "choice": _choice_text}


class Grammars:
    """The grammars of a model's constraints: its tokens as bytes, and what was made of them lately.

    Safe for threads: requests are checked in those that bring them.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, ends: Iterable[int]):
        self.vocab = vocab
        self.ends = np.array(sorted(token for token in ends if token < vocab), np.int64)
        self.tokens = token_bytes(tokenizer, vocab)
        for token in self.ends:  # of some models, a token with a text
            self.tokens[token] = b""
        self.texts = _trie(self.tokens)
        self._made: OrderedDict[tuple[Constraint, bool], LLMatcher] = OrderedDict()
        self._lock = Lock()

    @staticmethod
    def of(loaded: Loaded, vocab: int) -> Grammars:
        """The one of this model, of so many tokens to choose from. Raises what says why there is none."""
        if loaded.tokenizer is None:
            raise RequestError("A constraint needs a tokenizer, and this source has none.")
        if find_spec("llguidance") is None:
            raise UnsupportedError(
                'Constrained output needs llguidance, which is not installed: pip install "qkv[constrained]".'
            )
        with _making:
            if "grammars" not in loaded.serving:
                loaded.serving["grammars"] = Grammars(loaded.tokenizer, vocab, loaded.eos_ids)
            found: Grammars = loaded.serving["grammars"]
            return found

    def begin(self, wanted: Constraint, decoder: IncrementalDecoder | None) -> Matcher:
        """For an answer whose tokens `decoder` reads next. Raises RequestError with what is wrong."""
        if decoder is not None and decoder.unfinished:
            raise RequestError(
                "The prompt ends within a character, whose rest no constrained answer can begin with."
            )
        return Matcher(self, (wanted, decoder is not None and decoder.drops_space))

    def state(self, which: tuple[Constraint, bool], anew: bool = False) -> LLMatcher:
        """The beginning of a grammar, for one answer: from those kept, or made `anew`."""
        with self._lock:
            found = None if anew else self._made.pop(which, None)
            if found is None:
                found = self._make(*which)
            self._made[which] = found
            while len(self._made) > MOST_GRAMMARS:
                self._made.popitem(last=False)
            return found.deep_copy()

    def _make(self, wanted: Constraint, after_space: bool) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=MOST_STATES, verbose_errors=False)
        # a space that decoding drops comes first, so that the text is what follows it
        text = HEAD + ('" " ' if after_space else "") + _rule(wanted)
        made = LLMatcher(self.texts, text, log_level=0, limits=limits)
        if made.is_error():
            raise RequestError(f"{wanted.kind} cannot be used: {_short(made.get_error())}.")
        return made


_making = Lock()  # a model has one, whatever threads ask for it first


def _rule(wanted: Constraint) -> str:
    from llguidance import regex_to_lark

    if wanted.kind == "json_schema":
        return "%json " + json.dumps({**json.loads(wanted.text), "x-guidance": {"whitespace_pattern": SPACE}})
    pattern = wanted.text
    if wanted.kind == "choice":
        # one expression: of texts that begin alike none is taken for another
        pattern = "|".join(re.sub(r"[][\\.+*?()|{}^$]", r"\\\g<0>", text) for text in json.loads(pattern))
    return f"/{regex_to_lark(pattern, '')}/"


def _short(message: str) -> str:
    """The one line of a message that says what is wrong."""
    error = re.search(r"^error: (.*)", message, re.MULTILINE)
    line = error[1] if error else re.sub(r"^at \d+\(\d+\): ", "", message.split("\n", 1)[0])
    return line.removeprefix("failed to compile JSON schema: ")[:200].rstrip(". ")


def token_bytes(tokenizer: Tokenizer, vocab: int) -> list[bytes]:
    """What each token adds to a text; nothing for those that add none, or that no text should hold."""
    parts = tokenizer.vocabulary
    silent = tokenizer.special_ids | tokenizer.control_ids | tokenizer.eos_ids | {parts.unknown}
    known = min(vocab, tokenizer.vocab_size)
    written = (token for token in range(known) if token not in silent and parts.tokens[token] is not None)
    found = [b""] * vocab
    for token in written:
        found[token] = parts.pieces[token]
    return found


class _Texts:
    """The tokens as llguidance takes them, and an end of its own: a model may have several, or none."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, tokens: list[bytes]):
        self.tokens, self.eos_token_id = [*tokens, b""], len(tokens)

    def __call__(self, text: object) -> list[int]:
        raise RequestError("A grammar asked for the tokens of a text, which it is told not to.")


def _trie(tokens: list[bytes]) -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer(_Texts(tokens), n_vocab=len(tokens) + 1, eos_token=[len(tokens)])  # type: ignore[arg-type]


class Matcher:
    """How far an answer has come in its grammar.

    `allowed` (vocab,) are the tokens that may follow: those with which the text can still become one of
    the grammar's, and end tokens exactly where it is one. `complete` says that nothing else may follow.
    """

    def __init__(self, grammars: Grammars, which: tuple[Constraint, bool]):
        self.grammars, self.which = grammars, which
        self.taken: list[int] = []
        self.allowed: NDArray[np.bool_]
        self.complete = False
        self.state = grammars.state(which)
        self._settle()

    def fork(self) -> Matcher:
        """Another that goes on from here."""
        other = object.__new__(Matcher)
        vars(other).update(vars(self), taken=list(self.taken), state=self.state.deep_copy())
        return other

    def take(self, token: int) -> None:
        """Goes on by a token. Raises RequestError where it cannot: the answer must then end.

        A token that adds no text changes nothing: an end, or one that the model's files force.
        """
        if self.grammars.tokens[token]:
            self.taken.append(token)
            self.state.consume_token(token)
            self._settle()

    def _settle(self) -> None:
        """Finds what may follow. What failed is tried once more from the beginning, by itself.

        All states of a grammar share one lexer with room for so many states: others may have filled it.
        """
        if not self._look():
            self.state = self.grammars.state(self.which, anew=True)
            self.state.consume_tokens(self.taken)
            if not self._look():
                raise RequestError(self._problem())

    def _look(self) -> bool:
        bits = np.frombuffer(self.state.compute_bitmask(), np.uint8)
        if self.state.is_error() or self.state.stop_reason() == "NoExtensionBias":
            return False  # its mask then says that the text may end, which it may not
        vocab = self.grammars.vocab
        allowed = np.unpackbits(bits, count=vocab + 1, bitorder="little").view(np.bool_)
        accepts, allowed = bool(allowed[vocab]), allowed[:vocab]
        self.complete = accepts and not allowed.any()
        allowed[self.grammars.ends] = accepts
        self.allowed = allowed
        return accepts or bool(allowed.any())

    def _problem(self) -> str:
        reason, kind = _short(self.state.get_error()), self.which[0].kind
        if "NoExtension" in reason or not reason:
            where = "" if not self.taken else f" after {len(self.taken):,} tokens"
            return f"{kind}: no token can follow{where}, so no text of the model satisfies it."
        return f"{kind} could not be followed after {len(self.taken):,} tokens: {reason}."
