"""The comparison of plans with runs: its page and what it finds far off, with figures made up for it."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import planned
from benchmarks.models import SMOLLM2
from qkv.planning.timing import Time


def facts(*steps: float) -> dict[str, Any]:
    """Rounds in which a step took so many milliseconds, and plans that said ten."""
    samples = [
        [
            {
                "took": {"memory": 100e6, "prompt": 0.5, "step": step / 1e3},
                "plan": {"memory": 104e6, "prompt": 0.55, "step": 0.010},
                "others": 0.01 if step < 20 else 0.3,
            }
            for _ in planned.POINTS
        ]
        for step in steps
    ]
    machine = {"processor": "P", "cores": 2, "instructions": ["avx2"], "system": "Linux"}
    one = {"type": "Q4_1", "date": "2026-01-02", "samples": samples}
    return {"machine": machine, "threads": 2, "models": {SMOLLM2: one}}


def test_medians_of_the_rounds_are_compared() -> None:
    found = facts(9.0, 11.0, 40.0)
    assert planned.medians(found["models"][SMOLLM2]["samples"], 0)[2] == ("step", 0.011, 0.010)
    assert planned.far_off(found, SMOLLM2) == []  # one round that was disturbed is not what counts
    page = planned.document(found)
    assert "| 4,096 x 1 | 100 | 104 | **1.04** (1.04-1.04) | 500.0 | 550.0 | **1.10** (1.10-1.10) |" in page
    assert "| 11.0 | 10.0 | **0.91** (0.25-1.11) |" in page
    assert "3 rounds, 2 of them quiet" in page


def test_what_is_beyond_its_band_is_named() -> None:
    off = planned.far_off(facts(12.1), SMOLLM2)
    assert off == [f"{SMOLLM2}, {context} x {count}, step 0.83" for context, count in planned.POINTS]
    assert planned.far_off(facts(11.9), SMOLLM2) == []
    assert planned.far_off(facts(7.9), SMOLLM2)[0].endswith("step 1.27")


def test_seconds_are_those_of_a_time() -> None:
    assert planned.seconds(Time(0.25, "formula", 0.2)) == 0.25
    with pytest.raises(ValueError, match="without a profile"):
        planned.seconds(None)
