"""H32 to H36: the judges both ways."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import pytest

from qkv.claims.experiments import (
    luong_chinese,
    luong_spanish,
    parallel_spanish,
    translation_chinese,
    translation_spanish,
)
from qkv.claims.registry import CLAIMS
from tests.claims.translated import figures

TRANSLATORS = {
    "RNNencdec": (20, 5),
    "Bahdanau": (25, 20),
    "global, general": (26, 20),
    "ConvS2S": (28, 22),
    "Transformer": (29, 24),
}
LUONG = {
    "global, dot": (24, 18),
    "global, general": (25, 19),
    "global, concat": (20, 15),
    "global, location": (18, 12),
    "local-m": (24.5, 17.5),
    "local-p": (26, 20),
}
EXPECTED = {
    translation_chinese: TRANSLATORS,
    translation_spanish: dict(list(TRANSLATORS.items())[:3]),
    luong_chinese: LUONG,
    luong_spanish: LUONG,
    parallel_spanish: dict(list(TRANSLATORS.items())[2:]),
}
PLAIN = "RNNencdec"
LEAD = "Bahdanau's lead over RNNencdec is larger on the longest sentences than on the shortest"
KEEPS = "RNNencdec keeps less of its BLEU on the longest than Bahdanau"
NEAR = "Luong's global attention is within 3 BLEU of Bahdanau"
FURTHER = "local-p's lead over local-m is larger on the longest sentences than on the shortest"
Wrong = tuple[ModuleType, dict[str, Sequence[float]], set[str]]
WRONG: list[Wrong] = [
    (translation_chinese, {"Transformer": (24, 18)}, {"Transformer is not below Bahdanau"}),
    (
        translation_chinese,
        {"ConvS2S": (19, 5)},
        {f"ConvS2S is above {PLAIN} in {name}" for name in ("BLEU", "chrF")}
        | {"ConvS2S is not below Bahdanau"},
    ),
    (translation_chinese, {"Bahdanau": (36, 8)}, {LEAD, KEEPS}),
    (translation_spanish, {PLAIN: (8, 4)}, {LEAD}),
    (translation_spanish, {"global, general": (30, 30)}, {NEAR}),
    (luong_chinese, {"global, dot": (10, 8)}, {"dot is above location", "dot is not below concat"}),
    (
        luong_chinese,
        {"global, general": (10, 8)},
        {"general is above location", "general is not below concat"},
    ),
    (luong_chinese, {"global, concat": (30, 30)}, {"dot is not below concat", "general is not below concat"}),
    (
        luong_chinese,
        {"local-p": (23, 18), "local-m": (19, 13)},
        {"local-p is not below global attention by the same score"},
    ),
    (luong_chinese, {"local-m": (26.5, 20)}, {"local-m is below local-p"}),
    (luong_chinese, {"local-m": (23, 17.5)}, {FURTHER}),
    (luong_spanish, {"local-m": (20, 14)}, {"local-m is within 2 BLEU of local-p"}),
    (luong_spanish, {"global, location": (21.5, 21)}, {"dot is above location"}),
    (
        parallel_spanish,
        {"ConvS2S": (20, 20)},
        {f"ConvS2S is above Luong's in {name}" for name in ("BLEU", "chrF")},
    ),
    (
        parallel_spanish,
        {"Transformer": (20, 20)},
        {f"the Transformer is above ConvS2S in {name}" for name in ("BLEU", "chrF")},
    ),
]


@pytest.mark.parametrize("experiment", EXPECTED)
def test_all_but_the_seeds_holds_of_figures_as_expected(experiment: ModuleType) -> None:
    checks = experiment.judge([figures(EXPECTED[experiment])])
    assert [check.what for check in checks if not check.holds] == ["three seeds give the same order"]


@pytest.mark.parametrize(("experiment", "otherwise", "fails"), WRONG)
def test_each_part_can_fail(
    experiment: ModuleType, otherwise: dict[str, Sequence[float]], fails: set[str]
) -> None:
    checks = experiment.judge([figures({**EXPECTED[experiment], **otherwise})])
    failed = {check.what for check in checks if not check.holds}
    assert failed == fails | {"three seeds give the same order"}


def test_all_of_them_are_trained_once() -> None:
    for number in range(32, 37):
        (claim,) = [claim for claim in CLAIMS.values() if claim.number == f"H{number}"]
        assert claim.seeds_of(3) == 1 and claim.load() in EXPECTED
