"""H6: the judge both ways, the stories against a reader of their own, and starts side by side."""

from __future__ import annotations

from copy import deepcopy
from random import Random

import pytest
import torch

from qkv.claims.claim import Figures, Run
from qkv.claims.experiments import memory_hops
from qkv.claims.experiments.memory_hops import (
    AT_ONCE,
    BAG,
    LATEST,
    ONE,
    ORDERED,
    PLACES,
    THREE,
    TIMELESS,
    VARIANTS,
    WORDS,
    Descent,
    Starts,
    belongings,
    built,
    encoded,
    hits_of,
    judge,
    sides,
    total,
    trained,
    whereabouts,
)
from qkv.lineage.memory_network import loss

RUN = Run("memory-hops", 0, "smoke")


def figures() -> Figures:
    shares = {LATEST: 0.99, TIMELESS: 0.6, ONE: 0.5, THREE: 0.88, AT_ONCE: 0.8, ORDERED: 0.97, BAG: 0.75}
    hard = {LATEST: 0.98, TIMELESS: 0.45}
    return {name: {"right": share, "hard": hard.get(name, 0.5)} for name, share in shares.items()}


def test_all_holds_of_figures_as_expected() -> None:
    checks = judge([figures()] * 3)
    assert len(checks) == 7 and all(check.holds for check in checks)


@pytest.mark.parametrize(
    ("name", "what", "value", "words"),
    [
        (ONE, "right", 0.8, "less than half of one hop's errors"),
        (ORDERED, "right", 0.9, "position encoding"),
        (BAG, "right", 0.85, "a bag of words"),
        (LATEST, "hard", 0.9, "latest of several places"),
        (TIMELESS, "hard", 0.7, "without places"),
        (AT_ONCE, "right", 0.9, "linear start"),
    ],
)
def test_one_seed_that_is_otherwise_is_enough(name: str, what: str, value: float, words: str) -> None:
    wrong = deepcopy(figures())
    wrong[name][what] = value
    failed = [check.what for check in judge([figures(), wrong]) if not check.holds]
    assert len(failed) == 1 and words in failed[0]


def test_three_hops_that_are_better_but_not_good_fail_by_their_own_bound() -> None:
    wrong = figures()
    wrong[THREE]["right"], wrong[AT_ONCE]["right"], wrong[ONE]["right"] = 0.79, 0.7, 0.3
    assert [check.holds for check in judge([figures(), wrong])] == [False, *[True] * 6]


def last_place(sentences: list[str], who: str) -> str:
    return [words.split()[-1] for words in sentences if words.startswith(who) and " to the " in words][-1]


def test_the_latest_place_is_asked_for() -> None:
    random = Random(0)
    stories = [whereabouts(random) for _ in range(300)]
    for story in stories:
        who = story.question.split()[-1]
        assert story.answer == last_place(story.sentences, who)
        been = {words.split()[-1] for words in story.sentences if words.startswith(who)}
        assert story.hard == (len(been) > 1)
    assert 0.2 < sum(story.hard for story in stories) / 300 < 0.9
    assert {len(story.sentences) for story in stories} == {2, 4, 6, 8, 10}


def test_a_thing_is_where_whoever_took_it_went_last_and_she_went_since() -> None:
    random = Random(0)
    for story in (belongings(random) for _ in range(300)):
        thing = story.question.split()[-1]
        (took,) = [i for i, words in enumerate(story.sentences) if words.endswith(f"the {thing}")]
        who = story.sentences[took].split()[0]
        assert story.answer == last_place(story.sentences[took:], who)
        assert 6 <= len(story.sentences) <= 14


def test_the_question_about_sides_has_one_answer_and_a_bag_of_words_cannot_tell_half_of_them() -> None:
    random, both = Random(0), {True: 0, False: 0}
    for story in (sides(random) for _ in range(400)):
        facts = [(words.split()[1], words.split()[3], words.split()[6]) for words in story.sentences]
        asked = story.question.split()
        if asked[-1] == "of":  # what is the B north of: the room that it is north of
            found = [other for one, side, other in facts if (one, side) == (asked[3], asked[4])]
        else:  # what is north of the B
            found = [one for one, side, other in facts if (side, other) == (asked[2], asked[5])]
        assert found == [story.answer]
        room, side = (asked[3], asked[4]) if asked[-1] == "of" else (asked[5], asked[2])
        fitting = [words for words in story.sentences if {room, side} <= set(words.split())]
        assert story.hard == (len(fitting) == 2)
        both[story.hard] += 1
    assert min(both.values()) > 150


def test_stories_are_padded_on_the_right() -> None:
    random = Random(1)
    stories = [whereabouts(random) for _ in range(20)]
    rows = encoded(stories)
    names = {number: word for word, number in WORDS.items()}
    assert 0 not in names and len(names) == len(WORDS)
    for i, story in enumerate(stories):
        count = len(story.sentences)
        assert rows.present[i].tolist() == [place < count for place in range(rows.present.shape[1])]
        said = [" ".join(names[int(n)] for n in row if n) for row in rows.sentences[i, :count]]
        assert said == story.sentences and not rows.sentences[i, count:].any()
        assert names[int(rows.answers[i])] == story.answer in PLACES


def test_starts_side_by_side_are_what_each_is_alone() -> None:
    variant = VARIANTS[THREE]
    networks = [built(RUN, variant, start) for start in range(3)]
    stories = encoded([belongings(Random(i)) for i in range(8)])
    answer = Starts(networks)(stories.sentences, stories.present, stories.questions)
    losses = []
    for start, network in enumerate(networks):
        alone = network(stories.sentences, stories.present, stories.questions)
        assert torch.allclose(answer.logits[start], alone.logits, atol=1e-5)
        assert torch.allclose(answer.weights[start], alone.weights, atol=1e-6)
        losses.append(float(loss(alone, stories.answers).detach()))
    assert float(total(answer, stories.answers).detach()) == pytest.approx(sum(losses), rel=1e-5)
    assert not torch.allclose(answer.logits[0], answer.logits[1], atol=1e-2)


def test_each_start_is_clipped_by_itself() -> None:
    """One whose gradients are short goes on as it would alone, beside one whose gradients are long."""
    starts = Starts([built(RUN, VARIANTS[ONE], start) for start in range(2)])
    before = {name: value.detach().clone() for name, value in starts.named_parameters()}
    for parameter in starts.parameters():
        parameter.grad = torch.zeros_like(parameter)
    (first, *_) = starts.parameters()
    assert first.grad is not None
    first.grad[0].flatten()[0], first.grad[1].flatten()[0] = 100.0, 3.0
    Descent(starts, rate=0.5, most=40.0).step()
    moved = [before[name] - value.detach() for name, value in starts.named_parameters()]
    assert [float(moved[0][i].flatten()[0]) for i in (0, 1)] == pytest.approx([20, 1.5], rel=1e-4)
    assert all(float(move.abs().sum()) == 0 for move in moved[1:])


def test_without_places_order_is_nothing_and_stays_nothing() -> None:
    stories = encoded([whereabouts(Random(i)) for i in range(80)])
    rows = encoded([whereabouts(Random(i)) for i in range(80, 90)])
    full = rows.present.all(1)
    for name, blind in ((TIMELESS, True), (LATEST, False)):
        starts = Starts([built(RUN, VARIANTS[name], 0)])
        trained(RUN, starts, stories, VARIANTS[name], name)
        if blind:
            assert not any(bool(value.any()) for part, value in starts.named_parameters() if "places" in part)
        there, told, asked = rows.present[full], rows.sentences[full], rows.questions[full]
        with torch.no_grad():
            apart = (
                (starts(told, there, asked).logits - starts(told.flip(1), there, asked).logits).abs().max()
            )
        assert (float(apart) < 1e-5) == blind


def test_the_linear_start_ends_where_validation_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_hops, "stalled", lambda seen: True)
    stories = encoded([whereabouts(Random(i)) for i in range(80)])
    run = Run("memory-hops", 0, "smoke")
    for name, epochs in ((LATEST, 1), (AT_ONCE, 0)):
        losses, linear = trained(run, Starts([built(run, VARIANTS[name], 0)]), stories, VARIANTS[name], name)
        assert (len(losses), linear) == (2, epochs)


def test_hits_are_of_each_start() -> None:
    stories = encoded([whereabouts(Random(i)) for i in range(30)])
    networks = [built(RUN, VARIANTS[ONE], start) for start in range(2)]
    hits = hits_of(Starts(networks), stories)
    for start, network in enumerate(networks):
        said = network(stories.sentences, stories.present, stories.questions).logits.argmax(-1)
        assert hits[start].tolist() == (said == stories.answers).tolist()
