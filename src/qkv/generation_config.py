"""What a model's authors set for generation: the keys of a generation_config.json, strictly. No torch.

Every key is honoured, or known not to change what is generated, or has the value with which it says
nothing; anything else is an error. Loading then knows that nothing in the file is lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from qkv.errors import ConfigError
from qkv.families.config import shown

NAME = "generation_config.json"


@dataclass(frozen=True)
class Bounds:
    """The numbers that a setting may be, whole or any; bool is no number, and neither is infinity."""

    kind: type
    low: float
    high: float = math.inf

    def hold(self, value: Any) -> bool:
        number = isinstance(value, self.kind) and not isinstance(value, bool)
        return number and self.low <= value <= self.high and value != math.inf

    def __str__(self) -> str:
        what = "a whole number" if self.kind is Integral else "a number"
        high = self.high
        return f"{what} of at least {self.low}" if high == math.inf else f"{what} from {self.low} to {high}"


SAMPLING = {
    "temperature": Bounds(Real, 0),
    "top_k": Bounds(Integral, 0),
    "top_p": Bounds(Real, 0, 1),
    "min_p": Bounds(Real, 0, 1),
    "repetition_penalty": Bounds(Real, 0.01, 100),  # farther out, logits overflow
}
# small: each takes a row of the cache
SAMPLES = BEAMS = Bounds(Integral, 1, 128)
TOKEN = Bounds(Integral, 0)
HONOURED = {
    **SAMPLING,
    "max_new_tokens": Bounds(Integral, 1),
    "max_length": Bounds(Integral, 1),
    "min_new_tokens": Bounds(Integral, 0),
    "min_length": Bounds(Integral, 0),
    "no_repeat_ngram_size": Bounds(Integral, 0),
    "num_beams": BEAMS,
    "num_return_sequences": SAMPLES,
    "length_penalty": Bounds(Real, -10, 10),
    "decoder_start_token_id": TOKEN,
    "bos_token_id": TOKEN,
    "forced_bos_token_id": TOKEN,
}
# keys with a few values
WORDS: dict[str, tuple[bool | str, ...]] = {
    "do_sample": (True, False),
    "early_stopping": (True, False, "never"),
}
# one token id or a list of them; a list
TOKENS = ("eos_token_id", "forced_eos_token_id")
TOKEN_LISTS = ("suppress_tokens", "begin_suppress_tokens")

# where it came from; what a call returns beside the tokens; how it is computed (padding, caches,
# compilation, guesses that are verified); what only groups of beams ask for
IRRELEVANT = frozenset(
    """
    pad_token_id
    _commit_hash _from_model_config _name_or_path transformers_version
    output_attentions output_hidden_states output_logits output_scores return_dict_in_generate
    cache_config cache_implementation compile_config continuous_batching_config disable_compile
    low_memory max_cache_len prefill_chunk_size renormalize_logits use_cache
    assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind
    is_assistant max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule
    prompt_lookup_num_tokens speculation_type target_lookbehind use_mtp
    diversity_penalty
    """.split()  # noqa: SIM905 (a word list reads better)
)
# what Whisper's prompt is written from, in a file that says which languages there are: the prompt is given
SPOKEN = frozenset(
    """
    alignment_heads forced_decoder_ids is_multilingual lang_to_id language max_initial_timestamp_index
    no_timestamps_token_id prev_sot_token_id task task_to_id
    """.split()  # noqa: SIM905 (a word list reads better)
)
# values with which a key that is not honoured says nothing; null is one for all
NEUTRAL: dict[str, Any] = {
    "bad_words_ids": [],
    "constraints": [],
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "force_words_ids": [],
    "guidance_scale": 1,
    "num_beam_groups": 1,
    "penalty_alpha": 0,
    "remove_invalid_values": False,
    "return_timestamps": False,
    "sequence_bias": {},
    "stop_strings": [],
    "token_healing": False,
    "typical_p": 1,
}


def check(data: Mapping[str, Any]) -> None:
    """Raises ConfigError for a key that would be lost, or a value that cannot be, naming the way on."""
    irrelevant = IRRELEVANT | SPOKEN if "is_multilingual" in data else IRRELEVANT
    for key, value in data.items():
        if value is None or key in irrelevant:
            continue
        if key in WORDS:
            if not any(type(value) is type(word) and value == word for word in WORDS[key]):
                raise _wrong(NAME, key, value, f"; it must be {_listed(WORDS[key])}")
        elif key in TOKENS or key in TOKEN_LISTS:
            token_ids(data, key, NAME)
        elif key in HONOURED:
            if not HONOURED[key].hold(value):
                raise _wrong(NAME, key, value, f"; it must be {HONOURED[key]}")
        elif key not in NEUTRAL:
            raise _wrong(NAME, key, value, ", which is not known")
        elif value != NEUTRAL[key] or isinstance(value, bool) is not isinstance(NEUTRAL[key], bool):
            raise _wrong(NAME, key, value, ", which cannot be honoured yet")
    beams, samples = data.get("num_beams") or 1, data.get("num_return_sequences") or 1
    if beams > 1 and data.get("do_sample"):
        raise _wrong(NAME, "num_beams", beams, " with do_sample: beams that are drawn cannot be honoured yet")
    if beams > 1 and samples > beams:
        raise _wrong(NAME, "num_return_sequences", samples, f"; it must be at most num_beams, {beams}")


def _listed(words: tuple[bool | str, ...]) -> str:
    *most, last = [f'"{word}"' if isinstance(word, str) else str(word).lower() for word in words]
    return f"{', '.join(most)} or {last}"


def ends(data: Mapping[str, Any], where: str) -> frozenset[int]:
    """The tokens of `eos_token_id`: one, a list, or null for none. Raises ConfigError for anything else."""
    return frozenset(token_ids(data, "eos_token_id", where))


def token_ids(data: Mapping[str, Any], key: str, where: str = NAME) -> tuple[int, ...]:
    """The tokens of a key: a list, one where the key may have one, or null for none."""
    value = data.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if (key in TOKEN_LISTS and not isinstance(value, list | type(None))) or not all(map(TOKEN.hold, ids)):
        one = "" if key in TOKEN_LISTS else "a token id or "
        many = "a list of token ids" if key in TOKEN_LISTS else "a list of them"
        raise _wrong(where, key, value, f"; it must be {one}{many}")
    return tuple(ids)


def _wrong(where: str, key: str, value: Any, problem: str) -> ConfigError:
    return ConfigError(
        f'{where}: {key} is {shown(value)}{problem}. Pass ignore=("{key}",) to load without it.'
    )
