"""H27: the judge both ways, and each policy against what it must give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qkv import spec
from qkv.claims.claim import Figures, Run
from qkv.claims.experiments import smaller_cache
from qkv.claims.experiments.smaller_cache import (
    POLICIES,
    compared,
    drawn_by_first,
    h2o,
    judge,
    stepped,
    under,
)
from qkv.claims.models import initialised, small_lm
from qkv.claims.training import loss_by_position
from qkv.nn import Transformer
from qkv.runtime.compression import HeavyHitters, Sinks

RUN = Run("smaller-cache", 0, "smoke")


def of(drawn: float, **losses: float) -> Figures:
    return {"drawn": drawn} | {name: {"late": losses[name.lower()]} for name in POLICIES}


def figures() -> Figures:
    return {
        "tiny": of(0.05, whole=2.0, window=2.04, sinks=2.03, h2o=2.02),
        "smollm2": of(0.6, whole=3.0, window=6.0, sinks=3.1, h2o=3.05),
    }


def test_all_holds_of_figures_as_expected() -> None:
    checks = judge([figures()] * 3)
    assert len(checks) == 6 and all(check.holds for check in checks)


@pytest.mark.parametrize(
    ("drawn", "window", "holds"),
    [(0.05, 2.04, True), (0.05, 2.2, False), (0.4, 2.2, True), (0.4, 2.04, False)],
)
def test_the_first_keys_are_needed_just_where_they_are_sinks(
    drawn: float, window: float, holds: bool
) -> None:
    tiny = of(drawn, whole=2.0, window=window, sinks=2.03, h2o=2.02)
    checks = judge([figures(), figures() | {"tiny": tiny}])
    assert checks[0].holds is holds and all(check.holds for check in checks[1:])


@pytest.mark.parametrize(
    ("real", "failed"),
    [
        (of(0.1, whole=3.0, window=6.0, sinks=3.1, h2o=3.0), ["are sinks"]),
        (of(0.6, whole=3.0, window=4.0, sinks=3.1, h2o=3.0), ["over one nat"]),
        (of(0.6, whole=3.0, window=6.0, sinks=3.4, h2o=3.0), ["first keys and a window are within"]),
        (of(0.6, whole=3.0, window=6.0, sinks=3.1, h2o=3.4), ["H2O is within"]),
        (of(0.6, whole=3.0, window=6.0, sinks=3.1, h2o=6.1), ["H2O is within", "H2O is below"]),
    ],
)
def test_real_weights_that_are_otherwise_in_one_seed_fail(real: Figures, failed: list[str]) -> None:
    found = [check.what for check in judge([figures(), figures() | {"smollm2": real}]) if not check.holds]
    assert len(found) == len(failed) and all(part in what for part, what in zip(failed, found, strict=True))


def test_where_smollm2_is_not_installed_it_is_said() -> None:
    checks = judge([figures() | {"smollm2": None}] * 3)
    assert checks[0].holds and not any(check.holds for check in checks[1:])
    assert all("not installed" in check.measured for check in checks[1:])


def network(layers: int = 2) -> Transformer:
    model = small_lm(13, width=16, heads=2, layers=layers, position=spec.Rotary())
    return initialised(model, torch.Generator().manual_seed(0), lambda weight: 0.5)


def rows(length: int = 21) -> torch.Tensor:
    return torch.randint(13, (3, length), generator=torch.Generator().manual_seed(1))


def test_a_cache_that_holds_all_gives_what_one_pass_gives() -> None:
    plain, text = network(), rows()
    whole = loss_by_position(plain, text)
    assert torch.allclose(stepped(RUN, plain, text, HeavyHitters(19)), whole, atol=1e-4)
    for policy in (None, Sinks(20, 0), Sinks(20, 4)):
        assert torch.allclose(loss_by_position(under(plain, policy), text, 1), whole, atol=1e-4)
    assert (stepped(RUN, plain, text, HeavyHitters(8)) - whole).abs().max() > 1e-2


def test_policies_of_one_budget_differ_only_once_it_is_full() -> None:
    plain, text, budget = network(), rows(), 8
    whole = loss_by_position(plain, text)
    several = [
        loss_by_position(under(plain, Sinks(budget, 0)), text),
        loss_by_position(under(plain, Sinks(budget, 4)), text),
        stepped(RUN, plain, text, h2o(budget)),
    ]
    for losses in several:
        assert torch.allclose(losses[:budget], whole[:budget], atol=1e-4)
        assert abs(float(losses[budget] - whole[budget])) > 1e-4  # the first query that sees less


def test_h2o_that_keeps_only_the_latest_is_a_window() -> None:
    """In one layer: positions do not matter there, as rotations see distances alone."""
    plain, text = network(layers=1), rows()
    window = loss_by_position(under(plain, Sinks(8, 0)), text)
    assert torch.allclose(stepped(RUN, plain, text, HeavyHitters(7, 7)), window, atol=1e-4)


def test_the_weights_are_shared_and_masks_are_others() -> None:
    plain = network()
    other = under(plain, Sinks(8, 4))
    for name, parameter in plain.named_parameters():
        assert other.get_parameter(name).data_ptr() == parameter.data_ptr()
    assert other.spec != plain.spec and under(plain, None) is plain


def test_equal_weights_draw_an_even_share_to_the_first_keys() -> None:
    plain = network()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name.endswith("query.weight"):
                parameter.zero_()
    # 20 queries, of which the 11th to the 20th count: each gives 4 of its keys 4 / keys
    even = sum(4 / keys for keys in range(11, 21)) / 10
    assert drawn_by_first(plain, rows()) == pytest.approx(even, rel=1e-5)


def test_late_losses_leave_out_where_policies_agree() -> None:
    found = compared(RUN, network(), rows(), 8)
    assert found["budget"] == 8 and found["length"] == 20
    losses = loss_by_position(network(), rows())
    assert found["whole"]["late"] == pytest.approx(float(losses[8:].mean()), rel=1e-5)
    assert found["whole"]["places"] == pytest.approx([float(losses[:16].mean()), float(losses[16:].mean())])


def test_a_loaded_model_is_compared_and_one_that_is_not_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.engine.tiny import tiny

    run = Run("smaller-cache", 0, "full")
    monkeypatch.setattr(smaller_cache, "REAL", (24, 8))
    monkeypatch.setattr(smaller_cache, "long_text", lambda: ("made up", "hello " * 400))

    def loaded(source: str, runtime: str) -> Any:
        assert (source, runtime) == ("smollm2", "torch")
        return tiny(seed=1)

    monkeypatch.setattr(smaller_cache.qkv, "load", loaded)
    found = smaller_cache.on_smollm2(run)
    assert found is not None and found["text"] == "made up" and found["length"] == 24
    assert found["window"]["late"] != found["sinks"]["late"] != found["H2O"]["late"]

    def missing(source: str, runtime: str) -> Any:
        raise smaller_cache.SourceError("smollm2 is not installed.")

    monkeypatch.setattr(smaller_cache.qkv, "load", missing)
    assert smaller_cache.on_smollm2(run) is None
