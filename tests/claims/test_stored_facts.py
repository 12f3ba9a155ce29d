"""H23: the judge both ways, and knocking out and editing of networks small enough to know."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qkv.claims.claim import Figures, Run
from qkv.claims.experiments import stored_facts
from qkv.claims.experiments.stored_facts import (
    FACTS,
    LAYERS,
    NAMES,
    OBJECTS,
    VOCAB,
    WORDINGS,
    answers,
    edit,
    facts,
    judge,
    knocked_out,
    mean_of_rows,
    right,
)
from qkv.claims.models import initialised, small_lm
from qkv.explanation import Reading, key_moment
from qkv.nn import Transformer
from qkv.spec import Learned

RUN = Run("stored-facts", 0, "smoke")


def figures(**changed: Any) -> Figures:
    found: Figures = {
        "right": 1.0,
        "out": {
            "feed_forward": {"each": [0.1, 0.8, 0.9], "all": 0.01},
            "attention": {"each": [0.3, 0.9, 0.9], "all": 0.05},
        },
        "edits": {"efficacy": 1.0, "paraphrase": 0.9, "specificity": 0.9, "kept": 0.95},
    }
    for path, value in changed.items():
        *into, last = path.split("__")
        part = found
        for name in into:
            part = part[name]
        part[last] = value
    return found


def test_all_holds_of_figures_as_expected() -> None:
    checks = judge([figures()] * 3)
    assert len(checks) == 7 and all(check.holds for check in checks)


@pytest.mark.parametrize(
    ("path", "value", "failed"),
    [
        ("right", 0.9, "the facts are learned"),
        ("out__attention__each", [0.9, 0.9, 0.05], "without one feed-forward"),
        ("out__feed_forward__all", 0.06, "without all feed-forwards"),
        ("edits__efficacy", 0.89, "edit: efficacy"),
        ("edits__paraphrase", 0.7, "edit: paraphrase"),
        ("edits__specificity", 0.7, "edit: specificity"),
        ("edits__kept", 0.7, "edit: over 75 % of all other"),
    ],
)
def test_what_is_otherwise_in_one_seed_does_not_hold(path: str, value: Any, failed: str) -> None:
    (check,) = [check for check in judge([figures(), figures(**{path: value})]) if not check.holds]
    assert check.what.startswith(failed)


def test_subjects_are_different_and_each_object_has_four() -> None:
    known = facts(torch.Generator().manual_seed(0))
    assert known.prompts.shape == (FACTS, WORDINGS, 3)
    subjects = {tuple(row) for row in known.prompts[:, 0, :2].tolist()}
    assert len(subjects) == FACTS and max(max(one) for one in subjects) < NAMES
    assert known.objects.bincount().tolist() == [0] * NAMES + [FACTS // OBJECTS] * OBJECTS
    assert (known.prompts[:, :, 2] == NAMES + OBJECTS + torch.arange(WORDINGS)).all()
    assert (known.prompts[:, 1:, :2] == known.prompts[:, :1, :2]).all()


def network(spread: float = 0.3) -> Transformer:
    model = small_lm(VOCAB, layers=LAYERS, position=Learned(3))
    return initialised(model, torch.Generator().manual_seed(0), lambda weight: spread)


def test_what_is_knocked_out_is_the_same_for_all_prompts() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    assert mean_of_rows(rows).tolist() == [[2.0, 4.0]] * 2


def test_a_mixer_that_tells_nothing_apart_can_be_knocked_out_at_no_cost() -> None:
    plain, known = network(), facts(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for layer in (0, 2):
            plain.trunk.layers[layer].get_submodule("feed_forward.down").get_parameter("weight").zero_()
    prompts = known.prompts.flatten(0, 1)
    own = answers(plain, prompts)  # all right, by definition
    assert right(plain, prompts, own) == 1
    found = knocked_out(plain, prompts, own, "feed_forward")
    assert found["each"][0] == found["each"][2] == 1 > found["each"][1]
    assert found["all"] == found["each"][1]
    attention = knocked_out(plain, prompts, own, "attention")
    assert attention["all"] <= min(attention["each"]) < 1


def test_an_edit_is_scored_where_it_is_made_and_undone_afterwards() -> None:
    plain, known = network(), facts(torch.Generator().manual_seed(0))
    prompts = known.prompts.flatten(0, 1)
    moment = key_moment(Reading(plain, prompts), 1)
    moment = moment + 1e-3 * moment.diagonal().mean() * torch.eye(len(moment), dtype=moment.dtype)
    before = answers(plain, prompts)
    own = known._replace(objects=answers(plain, known.prompts[:, 0]))  # what it answers anyway
    new = int(next(token for token in own.objects.unique() if token != own.objects[7]))
    found = edit(plain, own, 1, moment, 7, new)
    assert found["efficacy"] == 1
    assert 0 <= found["paraphrase"] <= 1 and found["kept"] < 1
    assert torch.equal(answers(plain, prompts), before)


def test_an_edit_that_changes_nothing_has_no_effect_and_keeps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_facts, "rank_one", lambda weight, key, value, moment: weight.detach())
    plain, known = network(), facts(torch.Generator().manual_seed(0))
    own = known._replace(objects=answers(plain, known.prompts[:, 0]))
    new = int(next(token for token in own.objects.unique() if token != own.objects[7]))
    moment = torch.eye(256, dtype=torch.float64)
    found = edit(plain, own, 1, moment, 7, new)
    assert found["efficacy"] == 0 and found["kept"] == 1 and found["specificity"] == 1


def test_the_edited_layer_is_the_one_whose_feed_forward_matters_most(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def known(network: Transformer, prompts: torch.Tensor, objects: torch.Tensor, kind: str) -> Figures:
        return {"each": [0.5, 0.9, 0.2] if kind == "feed_forward" else [0.0, 0.1, 0.9], "all": 0.0}

    monkeypatch.setattr(stored_facts, "knocked_out", known)
    monkeypatch.setattr(stored_facts, "edits", lambda run, network, known, layer: asked.append(layer) or {})
    monkeypatch.setattr(stored_facts, "taught", lambda run, known: (network(), {}))
    assert stored_facts.measure(RUN)["layer"] == 2 and asked == [2]
