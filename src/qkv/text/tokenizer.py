"""The tokenizer: text or a conversation in, token ids out, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import tokenizers

from qkv.errors import TokenizerError
from qkv.text.chat import PROBE, Chat
from qkv.text.decoding import IncrementalDecoder, decode
from qkv.text.pieces import is_byte, token_of
from qkv.text.vocabulary import Vocabulary, hidden_name


class Tokenizer:
    """Text to token ids and back, as the model's files define it.

    `vocab_size` is the number of ids. `bos_id` and `pad_id` are None where the files name none.
    `adds_bos` and `adds_eos` say what plain encoding puts around a text. `special_ids` are the ids
    that decoding leaves out; `control_ids` are those no user text can become.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.vocab_size = len(vocabulary.tokens)
        self.bos_id = vocabulary.named.get("bos")
        self.pad_id = vocabulary.named.get("pad")
        self.adds_bos = bool(vocabulary.before)
        self.adds_eos = bool(vocabulary.after)
        self.special_ids = frozenset(token.id for token in vocabulary.added if token.special)
        self.control_ids = vocabulary.controls - {vocabulary.unknown}
        # One model, two ways in: by their own text control tokens are found in a raw prompt, and
        # by their hidden names in the scaffold of a chat, where the rest is ordinary text.
        self._raw = _Encoder(vocabulary, hidden=False)
        self._guarded = _Encoder(vocabulary, hidden=True)

    @property
    def vocabulary(self) -> Vocabulary:
        """The parts that it was put together from."""
        return self._vocabulary

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, or None."""
        return self._vocabulary.templates.get("default")

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """All ids that end a turn: those the files name, and the one the template closes a turn with."""
        return self._vocabulary.ends | self._turn_end()

    def encode(
        self, text: str, *, bos: bool | None = None, eos: bool | None = None, specials: bool = True
    ) -> list[int]:
        """Token ids of a text.

        With `bos` or `eos` None the model's files decide; there is never more than one BOS, also
        when the text begins with it. `specials=False` takes the text of control tokens as
        ordinary text. A character that the vocabulary cannot write becomes its unknown token, or
        nothing where it has none, as in the model's own tokenizer. Raises TokenizerError for a BOS
        or EOS that does not exist, and for text that is no Unicode.
        """
        ids = (self._raw if specials else self._guarded).encode(text)
        return self._around(ids, bos, eos)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of ids, exactly: no space is tidied. Raises TokenizerError for an unknown id."""
        return decode(self._vocabulary.pieces, ids, self._skipped(skip_special))

    def stream(self, after: Sequence[int] = (), *, skip_special: bool = True) -> IncrementalDecoder:
        """A decoder for one id at a time, for a text that goes on after the ids of `after`."""
        return IncrementalDecoder(self._vocabulary.pieces, self._skipped(skip_special), after)

    def token(self, id: int) -> str:
        """The vocabulary's own text of an id, such as "Ġthe"."""
        return token_of(self._vocabulary.tokens, id)

    def id_of(self, token: str) -> int | None:
        """The id of a vocabulary text, or None."""
        return self._ids.get(token)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **arguments: Any
    ) -> str:
        """The text the chat template gives. As a prompt use `chat`: here nothing tells the
        template's control tokens from the same text in a message."""
        return self._chat.render(messages, add_generation_prompt, arguments).text

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **arguments: Any
    ) -> list[int]:
        """Token ids of a conversation: the template's control tokens, and no one else's.

        A message is a dict with `role` and `content` (a string, or a list of parts). `arguments`
        reach the template: see `qkv.text.chat.ARGUMENTS`. Raises TokenizerError without a
        template, for other arguments, and with the template's message when it refuses.
        """
        scaffold = self._chat.render(messages, add_generation_prompt, arguments)
        text = "".join(hidden_name(part) if isinstance(part, int) else part for part in scaffold.parts)
        ids = self._guarded.encode(text)
        written = [part for part in scaffold.parts if part in self.control_ids]
        if [id for id in ids if id in self.control_ids] != written:
            raise TokenizerError("The chat template's control tokens and those of its encoding differ.")
        return self._around(ids, None, False)

    def _around(self, ids: list[int], bos: bool | None, eos: bool | None) -> list[int]:
        before = self._edge("bos", bos, self._vocabulary.before)
        after = self._edge("eos", eos, self._vocabulary.after)
        while before and tuple(ids[: len(before)]) == before:
            ids = ids[len(before) :]
        return [*before, *ids, *after]

    def _edge(self, name: str, wanted: bool | None, usual: tuple[int, ...]) -> tuple[int, ...]:
        if wanted is False:
            return ()
        if usual or wanted is None:
            return usual
        if name not in self._vocabulary.named:
            raise TokenizerError(f"{name}=True: the model's tokenizer names no {name.upper()} token.")
        return (self._vocabulary.named[name],)

    def _skipped(self, skip_special: bool) -> frozenset[int]:
        return self.special_ids if skip_special else frozenset()

    def _turn_end(self) -> frozenset[int]:
        """The control token that the template writes right after what the assistant says, if any."""
        if self.chat_template is None:
            return frozenset()
        try:
            parts = self._chat.render(PROBE, False, {}).parts
        except TokenizerError:
            return frozenset()
        return frozenset(
            following
            for part, following in pairwise(parts)
            if isinstance(following, int) and isinstance(part, str) and part.rstrip().endswith("answer")
        )

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {token: id for id, token in enumerate(self._vocabulary.tokens) if token is not None}

    @cached_property
    def _chat(self) -> Chat:
        return Chat(self._vocabulary)


class _Encoder:
    """The pipeline with the added tokens in front, giving the ids of the files."""

    def __init__(self, vocabulary: Vocabulary, hidden: bool) -> None:
        pipeline = vocabulary.pipeline
        self._tokenizer = tokenizers.Tokenizer(pipeline.model)  # shares the model, copies nothing
        if pipeline.normalizer is not None:
            self._tokenizer.normalizer = pipeline.normalizer
        if pipeline.pre_tokenizer is not None:
            self._tokenizer.pre_tokenizer = pipeline.pre_tokenizer
        names: dict[str, int] = {}
        added = []
        for token in vocabulary.added:
            control = token.id in vocabulary.controls
            if hidden and not control and is_byte(token.text):
                continue  # in a message the text "<0x41>" is six characters, not the byte
            name = hidden_name(token.id) if hidden and control else token.text
            names[name] = token.id
            added.append(
                tokenizers.AddedToken(
                    name,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    single_word=token.single_word and not (hidden and control),
                    normalized=token.normalized and not (hidden and control),
                )
            )
        self._tokenizer.add_tokens(added)
        # The library numbers an added token anew unless its text is in the model's vocabulary.
        given = {self._tokenizer.token_to_id(name): id for name, id in names.items()}
        self._moved = {new: id for new, id in given.items() if new != id}

    def encode(self, text: str) -> list[int]:
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError as error:  # a str it cannot take
            raise TokenizerError("The text must be a string, without lone surrogates.") from error
        moved = self._moved
        return [moved.get(id, id) for id in ids] if moved else ids
