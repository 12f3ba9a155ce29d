"""The claims, in the order of their numbers. No torch: the experiments are imported when they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from qkv.claims.claim import Claim
from qkv.errors import RequestError

_CLAIMS = (
    Claim(
        name="unscaled-scores",
        number="H9",
        statement="Without the factor 1/sqrt(d_k) the softmax is saturated from the start and learns slower.",
        source="Vaswani et al. 2017, section 3.2.1",
        expectation="No √d_k, d_k=256: init softmax entropy ≈0, tiny Q/K gradients, slower loss.",
        experiment="unscaled_scores",
    ),
    Claim(
        name="word-order",
        number="H10",
        statement="Attention without positions sees a set: it cannot tell which of two tokens came first.",
        source="Vaswani et al. 2017, section 3.5; without a position but causal: Haviv et al. 2022",
        expectation=(
            '"aXb vs bXa" classification with MEAN POOLING (reading the last token leaks its identity): '
            "NoPE encoder 50 %, any PE 100 %, causal NoPE ≈100 %."
        ),
        experiment="word_order",
    ),
    Claim(
        name="norm-placement",
        number="H15",
        statement="A deep post-norm Transformer needs a warm-up of its learning rate; pre-norm does not.",
        source="Xiong et al. 2020",
        expectation=(
            "Norm: 12 layers d=64, lr 1e-3…3e-3, no warm-up: post-LN stalls/diverges, with warm-up fine; "
            "pre-LN fine; log init gradient norms."
        ),
        experiment="norm_placement",
    ),
    Claim(
        name="mask-leak",
        number="H16",
        statement="A mask that shows the future gives a perfect training loss and a useless model.",
        source="Vaswani et al. 2017, section 3.2.3",
        expectation=(
            "Leak: remove mask or diagonal=1: training loss → ~0, samples garbage, correct-mask loss far "
            "above baseline; Jacobian test fails."
        ),
        experiment="mask_leak",
    ),
    Claim(
        name="norm-and-activation",
        number="H21",
        statement="At equal parameters, the kind of norm and of activation changes little.",
        source="Zhang and Sennrich 2019; Shazeer 2020; Narang et al. 2021",
        expectation=(
            "LN vs RMS, ReLU/GELU/SwiGLU at equal parameters: 0–2 % differences; report noise honestly."
        ),
        experiment="norm_and_activation",
    ),
    Claim(
        name="cost-crossover",
        number="H25",
        statement="Scores cost more than the feed-forward from n = 4d on, attention in all from n = 2d on.",
        source="Vaswani et al. 2017, table 1; Kaplan et al. 2020, table 1",
        expectation=(
            "Cost: time scores vs FFN vs n at d=128: crossover near n=4d (512), total near 2d (hardware "
            "shifts it); FLOP counter exact."
        ),
        experiment="cost_crossover",
    ),
)

CLAIMS: Mapping[str, Claim] = {claim.name: claim for claim in _CLAIMS}


def chosen(names: Sequence[str]) -> list[Claim]:
    """Claims by name or number, each once; "all" is all. Raises RequestError for what there is not."""
    found: dict[str, Claim] = {}
    for name in names:
        same = [claim for claim in _CLAIMS if name.lower() in ("all", claim.name, claim.number.lower())]
        if not same:
            near = get_close_matches(name.lower(), CLAIMS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(CLAIMS)}."
            raise RequestError(f"There is no claim {name!r}; {hint}")
        found |= {claim.name: claim for claim in same}
    return list(found.values())
