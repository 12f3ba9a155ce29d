"""A configuration whose keys are taken one by one; what nobody took is the error message."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qkv.errors import ConfigError

REQUIRED: Any = object()

# Written into configurations by Hugging Face's libraries and those around them; none changes what a forward
# pass computes.
IRRELEVANT = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path _num_labels
    add_cross_attention architectures attention_dropout auto_map bad_words_ids begin_suppress_tokens
    bos_token_id chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample dropout dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size
    eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    hidden_dropout hidden_dropout_prob id2label initializer_range is_decoder is_encoder_decoder
    is_llama_config keys_to_ignore_at_inference label2id length_penalty max_length min_length model_type
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_router_logits output_scores pad_token_id padding prefix pretraining_tp
    problem_type pruned_heads remove_invalid_values repetition_penalty resid_pdrop residual_dropout
    return_dict return_dict_in_generate sbert_ce_default_activation_function sentence_transformers
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config transformers_version
    typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()  # noqa: SIM905 (a word list reads better)
)


LARGEST = 1 << 24  # of a width, a vocabulary, a number of heads: what nothing published comes near


@dataclass
class Record:
    """What became of the keys: those that were read, with their values, and those not understood.

    Given to `Config`, it makes reading lenient: an unknown key is noted instead of refused.
    """

    taken: dict[str, Any] = field(default_factory=dict)
    unknown: dict[str, Any] = field(default_factory=dict)


class Config:
    """Keys and values of one file (or of an object inside it), and which of them were used.

    `where` names the file in messages. `ignore` names keys the caller chose to do without: they
    read as absent. `called` gives the file's own names of keys that are taken by another. `record`
    notes what is read and makes reading lenient.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        where: str,
        ignore: Iterable[str] = (),
        called: Mapping[str, str] | None = None,
        record: Record | None = None,
    ):
        self.where, self.ignore, self.called = where, frozenset(ignore), called or {}
        self.record, self.derived, self.hidden = record, set[str](), frozenset[str]()
        self.data = {key: value for key, value in data.items() if key not in self.ignore}
        self.untaken = {key for key in self.data if key not in IRRELEVANT}

    def __contains__(self, key: str) -> bool:
        return self.data.get(key) is not None and key not in self.hidden

    def at(self, key: str) -> str:
        """A key as messages name it: the file, and its own name for the key."""
        return f"{self.where}: {self.called.get(key, key)}"

    def path(self, key: str) -> str:
        """A key as a record names it: within the file, with the keys it stands inside."""
        _, _, inside = self.where.partition(": ")
        outer = inside.replace(": ", ".") + "." if inside else ""
        return outer + self.called.get(key, key)

    def peek(self, key: str, default: Any = None) -> Any:
        """A value without marking it as used."""
        return default if key in self.hidden else self.data.get(key, default)

    def put(self, key: str, value: Any) -> None:
        """A value that was worked out from others, to be taken like those of the file."""
        if key not in self.ignore:
            self.data[key] = value
            self.untaken.add(key)
            self.derived.add(key)

    def hide(self, keys: Iterable[str]) -> None:
        """These belong to other kinds of model: they read as absent, and `finish` names them."""
        self.hidden = frozenset(keys)

    def take(self, key: str, kind: type | tuple[type, ...], default: Any = REQUIRED) -> Any:
        """The value of a key, of a kind; null and absent are the default, or an error without one."""
        if key in self.hidden:
            return default
        self.untaken.discard(key)
        value = self.data.get(key)
        if value is None:
            if default is REQUIRED:
                raise ConfigError(f"{self.at(key)} is missing.")
            return default
        if self.record is not None and key not in self.derived and not isinstance(value, dict):
            self.record.taken[self.path(key)] = value
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if isinstance(value, bool) and bool not in kinds:
            raise self._wrong(key, " or ".join(KINDS.get(k, f"a {k.__name__}") for k in kinds))
        if float in kinds and isinstance(value, int | float):
            return self._finite(key, value)
        if not isinstance(value, kinds):
            raise self._wrong(key, " or ".join(KINDS.get(k, f"a {k.__name__}") for k in kinds))
        return value

    def size(self, key: str, default: Any = REQUIRED, most: int = LARGEST) -> Any:
        """A whole number from 1 to `most`."""
        value = self.take(key, int, default)
        if value is not None and not 1 <= value <= most:
            raise self._wrong(key, f"from 1 to {most:,}")
        return value

    def positive(self, key: str, default: Any = REQUIRED) -> Any:
        """A number above 0."""
        value = self.take(key, float, default)
        if value is not None and value <= 0:
            raise self._wrong(key, "above 0")
        return value

    def choice(self, key: str, known: Mapping[str, Any], default: str) -> Any:
        """What a name stands for, of those that are known."""
        name = self.take(key, str, default)
        if name not in known:
            raise ConfigError(f"{self.at(key)} {shown(name)} is not known ({', '.join(known)}).")
        return known[name]

    def optional(self, key: str) -> int | None:
        """A size, where 0 stands for none as null and absent do."""
        return self.size(key) if self.take(key, int, 0) != 0 else None

    def each(self, key: str, known: Mapping[Any, Any], count: int, of: str) -> list[Any] | None:
        """What the entries of a list stand for, one for each of `count` things; None without a list."""
        values = self.take(key, list, None)
        if values is None:
            return None
        if len(values) != count:
            raise ConfigError(f"{self.at(key)} has {len(values):,} entries for {count:,} {of}.")
        for value in values:
            if not isinstance(value, str | int) or value not in known:
                names = ", ".join(str(name) for name in known)
                raise ConfigError(f"{self.at(key)} holds {shown(value)}, which is not known ({names}).")
        return [known[value] for value in values]

    def inside(self, key: str) -> Config | None:
        """The object under a key, to take from in turn."""
        value = self.take(key, dict, None)
        return None if value is None else self.again(value, self.at(key))

    def again(
        self,
        data: Mapping[str, Any],
        where: str | None = None,
        called: Mapping[str, str] | None = None,
        made: Iterable[str] = (),
    ) -> Config:
        """Other keys and values, taken as strictly or leniently as these and into the same record.

        `made` are those that no file holds.
        """
        called = {**self.called, **(called or {})}
        found = Config(data, where or self.where, self.ignore, called, self.record)
        found.hide(self.hidden)
        found.derived = set(made)
        return found

    def discard(self, *keys: str) -> None:
        """These say nothing that matters here."""
        self.untaken.difference_update(set(keys) - self.hidden)

    def leave(self, *keys: str) -> None:
        """These are of parts that the description is without: a record lists them, in the file or not."""
        self.discard(*keys)
        if self.record is not None:
            self.record.unknown.update({self.path(key): self.peek(key) for key in keys})

    def finish(self) -> None:
        """Raises ConfigError naming a key that nothing took; a record notes them all instead."""
        for key in sorted(self.untaken):
            if self.data[key] is None:
                continue
            if self.record is not None:
                self.record.unknown[self.path(key)] = self.data[key]
            else:
                raise ConfigError(
                    f"{self.at(key)} = {shown(self.data[key])} is not known for this kind of model. "
                    f'Pass ignore=("{key}",) to load without it.'
                )

    def _finite(self, key: str, value: float) -> float:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self._wrong(key, "a finite number")
        return number

    def _wrong(self, key: str, wanted: str) -> ConfigError:
        return ConfigError(f"{self.at(key)} is {shown(self.data.get(key))}; it must be {wanted}.")


KINDS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    dict: "an object",
}


def shown(value: Any, limit: int = 60) -> str:
    """A value from a file, fit to print: one line, and not a long one."""
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else f"{text[:limit]}..."
