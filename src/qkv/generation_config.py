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
LENGTHS = {"max_new_tokens": Bounds(Integral, 1), "max_length": Bounds(Integral, 1)}
HONOURED = {**SAMPLING, **LENGTHS}

# ids that the tokenizer's files decide about; where it came from; what a call returns beside the
# tokens; how it is computed (caches, compilation, guesses that are verified); what only beams ask for
IRRELEVANT = frozenset(
    """
    bos_token_id decoder_start_token_id pad_token_id
    _commit_hash _from_model_config _name_or_path transformers_version
    output_attentions output_hidden_states output_logits output_scores return_dict_in_generate
    cache_config cache_implementation compile_config continuous_batching_config disable_compile
    low_memory max_cache_len prefill_chunk_size renormalize_logits use_cache
    assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind
    is_assistant max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule
    prompt_lookup_num_tokens speculation_type target_lookbehind use_mtp
    diversity_penalty early_stopping length_penalty
    """.split()  # noqa: SIM905 (a word list reads better)
)
# values with which a key that is not honoured says nothing; null is one for all
NEUTRAL: dict[str, Any] = {
    "bad_words_ids": [],
    "begin_suppress_tokens": [],
    "constraints": [],
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "force_words_ids": [],
    "guidance_scale": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "penalty_alpha": 0,
    "remove_invalid_values": False,
    "sequence_bias": {},
    "stop_strings": [],
    "suppress_tokens": [],
    "token_healing": False,
    "typical_p": 1,
}


def check(data: Mapping[str, Any]) -> None:
    """Raises ConfigError for a key that would be lost, or a value that cannot be, naming the way on."""
    ends(data, NAME)
    for key, value in data.items():
        if value is None or key in IRRELEVANT or key == "eos_token_id":
            continue
        if key == "do_sample":
            if not isinstance(value, bool):
                raise _wrong(NAME, key, value, "; it must be true or false")
        elif key in HONOURED:
            if not HONOURED[key].hold(value):
                raise _wrong(NAME, key, value, f"; it must be {HONOURED[key]}")
        elif key not in NEUTRAL:
            raise _wrong(NAME, key, value, ", which is not known")
        elif value != NEUTRAL[key] or isinstance(value, bool) is not isinstance(NEUTRAL[key], bool):
            raise _wrong(NAME, key, value, ", which cannot be honoured yet")


def ends(data: Mapping[str, Any], where: str) -> frozenset[int]:
    """The tokens of `eos_token_id`: one, a list, or null for none. Raises ConfigError for anything else."""
    value = data.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(Bounds(Integral, 0).hold(token) for token in ids):
        raise _wrong(where, "eos_token_id", value, "; it must be a token id or a list of them")
    return frozenset(ids)


def _wrong(where: str, key: str, value: Any, problem: str) -> ConfigError:
    return ConfigError(
        f'{where}: {key} is {shown(value)}{problem}. Pass ignore=("{key}",) to load without it.'
    )
