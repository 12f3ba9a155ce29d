"""A configuration whose keys are taken one by one; what nobody took is the error message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qkv.errors import ConfigError

REQUIRED: Any = object()

# Written by the Hugging Face library into most configurations; none changes what a forward pass computes.
IRRELEVANT = frozenset(
    """
    _attn_implementation_autoset _commit_hash _name_or_path add_cross_attention architectures
    attention_dropout auto_map bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty
    do_sample dropout dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    hidden_dropout hidden_dropout_prob id2label initializer_range is_decoder is_encoder_decoder
    is_llama_config keys_to_ignore_at_inference label2id length_penalty max_length max_window_layers
    min_length model_type no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_router_logits output_scores pad_token_id prefix
    pretraining_tp problem_type pruned_heads remove_invalid_values repetition_penalty resid_pdrop
    residual_dropout return_dict return_dict_in_generate sep_token_id suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p
    torch_dtype torchscript transformers_version transformers.js_config typical_p unsloth_fixed
    unsloth_version use_bfloat16 use_cache
    """.split()  # noqa: SIM905 (a word list reads better)
)


class Config:
    """Keys and values of one file (or of an object inside it), and which of them were used.

    `where` names the file in messages. `ignore` names keys the caller chose to do without: they
    read as absent.
    """

    def __init__(self, data: Mapping[str, Any], where: str, ignore: Iterable[str] = ()):
        self.where, self.ignore = where, frozenset(ignore)
        self.data = {key: value for key, value in data.items() if key not in self.ignore}
        self.untaken = {key for key in self.data if key not in IRRELEVANT}

    def __contains__(self, key: str) -> bool:
        return self.data.get(key) is not None

    def peek(self, key: str, default: Any = None) -> Any:
        """A value without marking it as used."""
        return self.data.get(key, default)

    def take(self, key: str, kind: type | tuple[type, ...], default: Any = REQUIRED) -> Any:
        """The value of a key, of a kind; null and absent are the default, or an error without one."""
        self.untaken.discard(key)
        value = self.data.get(key)
        if value is None:
            if default is REQUIRED:
                raise ConfigError(f"{self.where}: {key} is missing.")
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if float in kinds and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(k.__name__ for k in kinds)
            raise ConfigError(f"{self.where}: {key} is {value!r}; it must be {_article(wanted)}.")
        return value

    def size(self, key: str, default: Any = REQUIRED) -> int:
        """A whole number of at least 1."""
        value = self.take(key, int, default)
        if value is not None and value < 1:
            raise ConfigError(f"{self.where}: {key} is {value}; it must be at least 1.")
        return value

    def inside(self, key: str) -> Config | None:
        """The object under a key, to take from in turn."""
        value = self.take(key, dict, None)
        return None if value is None else Config(value, f"{self.where}: {key}", self.ignore)

    def discard(self, *keys: str) -> None:
        """These say nothing that matters here."""
        self.untaken.difference_update(keys)

    def finish(self) -> None:
        """Raises ConfigError naming a key that nothing took."""
        for key in sorted(self.untaken):
            if self.data[key] is not None:
                raise ConfigError(
                    f"{self.where}: {key} = {self.data[key]!r} is not known for this kind of model. "
                    f'Pass ignore=("{key}",) to load without it.'
                )


def _article(kind: str) -> str:
    names = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false"}
    return " or ".join(names.get(part, f"a {part}") for part in kind.split(" or "))
