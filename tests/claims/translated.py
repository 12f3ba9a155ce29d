"""Made-up figures of translators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qkv.claims.claim import Figures


def figures(buckets: Mapping[str, Sequence[float]], sure: int = 100) -> Figures:
    """Systems by BLEU and chrF in two buckets; so many of 100 draws are so, the rest 50 less the score."""
    systems = {}
    for name, scores in buckets.items():
        mean = sum(scores) / 2

        def draws(score: float) -> list[float]:
            return [score] * sure + [50 - score] * (100 - sure)

        held = {
            "all": mean,
            "buckets": list(scores),
            "draws": draws(mean),
            "bucket draws": [draws(score) for score in scores],
        }
        curve = {"steps": [1, 2], "losses": [3.0, 2.0], "last": 2.0}
        systems[name] = {"parameters": 1, "curve": curve, "bleu": held, "chrf": held}
    return {"systems": systems, "lengths": [5.0, 20.0]}
