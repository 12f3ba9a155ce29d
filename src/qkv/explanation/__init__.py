"""Why a model answers as it does: evidence that is measured, beside what attention and gradients suggest.

    from qkv import explanation as explain

    reading = explain.Reading(model, "The capital of France is")
    metric = explain.Difference(paris, against=rome)
    explain.ablate(reading, metric, explain.parts.heads(reading)).top(5)

Every method gives an `Evidence`: numbers with named axes, what one number means, and against what.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qkv.explanation.result import Axis, Evidence, Ranked

if TYPE_CHECKING:
    from qkv.explanation import parts, roles
    from qkv.explanation.ablation import ablate, occlusion
    from qkv.explanation.attention import attention_flow, attention_maps, norm_weighted, rollout
    from qkv.explanation.attribution import direct_attribution
    from qkv.explanation.behaviour import Behaviour, Case, measure_behaviour, read_cases
    from qkv.explanation.explained import Explained, lines
    from qkv.explanation.explaining import explain
    from qkv.explanation.faithfulness import (
        agreement,
        comprehensiveness,
        deletion,
        insertion,
        spearman,
        sufficiency,
    )
    from qkv.explanation.gradients import gradient, gradient_times_input, integrated_gradients
    from qkv.explanation.intervention import Blank, Change, Mean, Resample, Zero, measure
    from qkv.explanation.lens import logit_lens, logit_lens_answers
    from qkv.explanation.memory import (
        Asked,
        EditScores,
        edit_scores,
        edited,
        key_at,
        key_moment,
        memories,
        neuron_readout,
        rank_one,
        target_value,
        value_at,
    )
    from qkv.explanation.metric import (
        Difference,
        Less,
        Logit,
        LogProbability,
        Loss,
        Metric,
        Probability,
        Similarity,
    )
    from qkv.explanation.pages import cases_page, page
    from qkv.explanation.pairs import aligned_attention, alignment, interactions, text_vector
    from qkv.explanation.parts import Part, Parts
    from qkv.explanation.patching import attribution_patching, patch, path_patching, recovered
    from qkv.explanation.reading import Reading
    from qkv.explanation.repair import direct_effects, self_repair
    from qkv.explanation.weights import adversarial_attention, permuted_attention

# imported at first use: a command line should not wait for torch
_LAZY = {
    "ablation": ("ablate", "occlusion"),
    "attention": ("attention_flow", "attention_maps", "norm_weighted", "rollout"),
    "attribution": ("direct_attribution",),
    "behaviour": ("Behaviour", "Case", "measure_behaviour", "read_cases"),
    "explained": ("Explained", "lines"),
    "explaining": ("explain",),
    "faithfulness": (
        "agreement", "comprehensiveness", "deletion", "insertion", "spearman", "sufficiency",
    ),
    "gradients": ("gradient", "gradient_times_input", "integrated_gradients"),
    "intervention": ("Blank", "Change", "Mean", "Resample", "Zero", "measure"),
    "lens": ("logit_lens", "logit_lens_answers"),
    "memory": (
        "Asked", "EditScores", "edit_scores", "edited", "key_at", "key_moment", "memories",
        "neuron_readout", "rank_one", "target_value", "value_at",
    ),
    "metric": (
        "Difference", "Less", "LogProbability", "Logit", "Loss", "Metric", "Probability", "Similarity",
    ),
    "parts": ("Part", "Parts"),
    "pages": ("cases_page", "page"),
    "pairs": ("aligned_attention", "alignment", "interactions", "text_vector"),
    "patching": ("attribution_patching", "patch", "path_patching", "recovered"),
    "reading": ("Reading",),
    "repair": ("direct_effects", "self_repair"),
    "weights": ("adversarial_attention", "permuted_attention"),
}  # fmt: skip
_MODULE = {name: module for module, names in _LAZY.items() for name in names}
_MODULES = ("parts", "roles")

__all__ = [
    "Asked",
    "Axis",
    "Behaviour",
    "Blank",
    "Case",
    "Change",
    "Difference",
    "EditScores",
    "Evidence",
    "Explained",
    "Less",
    "LogProbability",
    "Logit",
    "Loss",
    "Mean",
    "Metric",
    "Part",
    "Parts",
    "Probability",
    "Ranked",
    "Reading",
    "Resample",
    "Similarity",
    "Zero",
    "ablate",
    "adversarial_attention",
    "agreement",
    "aligned_attention",
    "alignment",
    "attention_flow",
    "attention_maps",
    "attribution_patching",
    "cases_page",
    "comprehensiveness",
    "deletion",
    "direct_attribution",
    "direct_effects",
    "edit_scores",
    "edited",
    "explain",
    "gradient",
    "gradient_times_input",
    "insertion",
    "integrated_gradients",
    "interactions",
    "key_at",
    "key_moment",
    "lines",
    "logit_lens",
    "logit_lens_answers",
    "measure",
    "measure_behaviour",
    "memories",
    "neuron_readout",
    "norm_weighted",
    "occlusion",
    "page",
    "parts",
    "patch",
    "path_patching",
    "permuted_attention",
    "rank_one",
    "read_cases",
    "recovered",
    "roles",
    "rollout",
    "self_repair",
    "spearman",
    "sufficiency",
    "target_value",
    "text_vector",
    "value_at",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE[name]}"), name)


def __dir__() -> list[str]:
    return __all__
