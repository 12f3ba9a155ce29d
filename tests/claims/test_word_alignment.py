"""H5: the judge both ways, labels by an independent rule, and what cannot see order."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from itertools import product
from random import Random

import pytest
import torch

from qkv.claims.claim import Figures, Run
from qkv.claims.experiments import word_alignment
from qkv.claims.experiments.word_alignment import (
    BOTH,
    CONTENT,
    EXCLUDED,
    FOLLOWS,
    NOUNS,
    ON_SICK,
    OPEN,
    PLAIN,
    TEMPLATES,
    VARIANTS,
    VERBS,
    built,
    cropped,
    draw,
    judge,
    label_of,
    of_order,
    of_words,
    on_sick,
    rows_of,
    sick,
    trained,
    vocabulary,
)

RUN = Run("word-alignment", 0, "smoke")


def figures() -> Figures:
    found: Figures = {name: {"words": 0.99, "order": 0.5, "example": [[1.0] * 6] * 4} for name in VARIANTS}
    found[BOTH]["order"] = 0.99
    return found | {"sick": {"majority": 0.567, **dict.fromkeys(ON_SICK, 0.7)}}


def test_all_holds_of_figures_as_expected() -> None:
    checks = judge([figures()] * 3)
    assert len(checks) == 8 and all(check.holds for check in checks)


@pytest.mark.parametrize(
    ("name", "what", "value"),
    [
        *((name, "words", 0.94) for name in VARIANTS),
        (PLAIN, "order", 0.51),
        (PLAIN, "order", 0.498),
        (CONTENT, "order", 0.51),
        (BOTH, "order", 0.9),
        ("sick", PLAIN, 0.5),
        ("sick", BOTH, 0.567),
    ],
)
def test_one_seed_that_is_otherwise_is_enough(name: str, what: str, value: float) -> None:
    wrong = deepcopy(figures())
    wrong[name][what] = value
    failed = [check.what for check in judge([figures(), wrong]) if not check.holds]
    assert len(failed) == 1 and (what if name == "sick" else name) in failed[0]


def test_without_sick_its_checks_say_so_and_the_pictures_leave_it_out() -> None:
    lacking = figures() | {"sick": None}
    failed = [check for check in judge([lacking] * 3) if not check.holds]
    assert [check.measured for check in failed] == ["not measured: SICK is not on this machine"] * 2
    assert ">SICK<" not in draw([lacking])["accuracy"] and ">SICK<" in draw([figures()])["accuracy"]


def test_sick_is_not_read_where_it_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("QKV_DATA", str(tmp_path))
    assert on_sick(RUN) is None
    lines = [
        "pair_ID\tA\tB\tscore\tjudgment",
        "1\tA Dog\tNo dog\t4.5\tCONTRADICTION",
        "2\tA\tA\t5\tENTAILMENT",
    ]
    (tmp_path / "SICK_train.txt").write_text("\n".join(lines))
    assert sick("sick-train", None) == [("a dog", "no dog", EXCLUDED), ("a", "a", FOLLOWS)]


@pytest.mark.parametrize(
    ("premise", "hypothesis", "label"),
    [
        (("all", "dogs", True, "run"), ("some", "poodles", True, "move"), FOLLOWS),
        (("all", "poodles", True, "run"), ("all", "dogs", True, "run"), OPEN),
        (("some", "poodles", True, "run"), ("some", "animals", True, "move"), FOLLOWS),
        (("no", "dogs", True, "move"), ("all", "poodles", False, "sprint"), FOLLOWS),
        (("no", "dogs", True, "sprint"), ("no", "dogs", True, "move"), OPEN),
        (("all", "dogs", True, "run"), ("no", "animals", True, "move"), EXCLUDED),
        (("some", "dogs", False, "run"), ("all", "dogs", True, "run"), EXCLUDED),
        (("no", "dogs", False, "run"), ("all", "dogs", True, "run"), FOLLOWS),  # no dogs do not run
        (("all", "cats", True, "run"), ("some", "dogs", True, "run"), OPEN),
        (("all", "animals", True, "eat"), ("some", "eagles", True, "sing"), OPEN),
    ],
)
def test_what_follows_by_hand(premise: tuple, hypothesis: tuple, label: int) -> None:  # type: ignore[type-arg]
    assert label_of(premise, hypothesis) == label


def test_labels_agree_with_worlds_of_real_sets() -> None:
    """Random worlds: no pair that follows has a false hypothesis in one, none that is excluded a true one."""
    random = Random(0)

    def leaves(word: str, tree: dict[str, str]) -> list[str]:
        below = [other for other in tree if tree[other] == word]
        return [word] if not below else [leaf for other in below for leaf in leaves(other, tree)]

    def above(word: str) -> set[str]:
        return {word} | (above(VERBS[word]) if VERBS[word] else set())

    sentences = list(product(("all", "some", "no"), NOUNS, (True, False), VERBS))
    for _ in range(60):
        does: dict[str, list[set[str]]] = {}  # of each kind of animal: what each individual does
        for leaf in leaves("animals", NOUNS):
            acts = [random.sample(list(VERBS), random.randint(0, 3)) for _ in range(random.randint(1, 2))]
            does[leaf] = [set().union(*map(above, one)) for one in acts]

        def true(sentence: tuple[str, str, bool, str], does: dict[str, list[set[str]]] = does) -> bool:
            quantifier, noun, affirmed, verb = sentence
            said = [(verb in acts) == affirmed for leaf in leaves(noun, NOUNS) for acts in does[leaf]]
            return any(said) if quantifier == "some" else all(one == (quantifier == "all") for one in said)

        for premise, hypothesis in zip(
            random.choices(sentences, k=100), random.choices(sentences, k=100), strict=True
        ):
            if true(premise):
                assert label_of(premise, hypothesis) != (EXCLUDED if true(hypothesis) else FOLLOWS)


def test_pairs_of_words_have_each_label_as_often_and_leave_out_what_they_should() -> None:
    known = of_words(Random(0), 300)
    assert Counter(pair.label for pair in known) == {FOLLOWS: 100, OPEN: 100, EXCLUDED: 100}
    fresh = of_words(Random(0), 300, set(known))
    assert not set(fresh) & set(known)


def test_pairs_of_order_have_the_same_words_and_none_of_the_test_is_trained_on() -> None:
    test, training = of_order(Random(0), 120)
    assert len(test) == 480 and not {pair.premise for pair in test} & {pair.premise for pair in training}
    for pair in test:
        a, act, b = pair.premise.split()
        assert pair.hypothesis in (f"{a} {act} {b}", f"{b} {act} {a}")
        assert pair.label == (FOLLOWS if pair.hypothesis == pair.premise else OPEN)
    premises = Counter(pair.premise for pair in test)
    assert set(premises.values()) == {2}


@pytest.mark.parametrize("name", VARIANTS)
def test_only_distances_tell_a_sentence_from_its_swap(name: str) -> None:
    pairs, _ = of_order(Random(0), 10)
    words = vocabulary(pairs)
    rows = rows_of(pairs, words)
    model = trained(RUN, VARIANTS[name], rows, words, TEMPLATES, name)
    if model.intra is not None:
        assert bool(model.intra.distance.any()) == (name == BOTH)
    with torch.no_grad():
        logits = model(*rows[:4]).logits
    apart = float((logits[0::2] - logits[1::2]).abs().max())
    assert apart > 1e-3 if name == BOTH else apart < 1e-5


def test_variants_start_alike_and_words_are_of_unit_length() -> None:
    plain, content, both = (built(RUN, VARIANTS[name], 9, 0.0) for name in (PLAIN, CONTENT, BOTH))
    assert torch.equal(plain.table, both.table) and torch.equal(plain.project.weight, both.project.weight)
    assert torch.equal(content.output.weight, both.output.weight)
    assert torch.allclose(plain.table.norm(dim=1), torch.ones(9)) and float(
        plain.null.norm()
    ) == pytest.approx(1)


def test_padding_is_said_not_to_be_there() -> None:
    pairs = [("no dogs run", "some dogs do not run", FOLLOWS), ("cats see dogs", "dogs see", OPEN)]
    words = vocabulary([word_alignment.Pair(*pair) for pair in pairs])
    rows = rows_of([word_alignment.Pair(*pair) for pair in pairs], words)
    assert rows.hypothesis_present.tolist() == [[True] * 5, [True, True, False, False, False]]
    names = {place: word for word, place in words.items()}
    assert [names[int(n)] for n in rows.hypothesis[1, :2]] == ["dogs", "see"]
    assert rows.labels.tolist() == [FOLLOWS, OPEN]


def test_only_places_without_any_word_are_cropped() -> None:
    pairs = [
        word_alignment.Pair(*pair) for pair in (("a b c d", "a", OPEN), ("a b", "a b c", OPEN), ("a", "b", 0))
    ]
    rows = rows_of(pairs, vocabulary(pairs))
    less = cropped(word_alignment.Rows(*(part[1:] for part in rows)))
    assert less.premise.tolist() == rows.premise[1:, :2].tolist() and less.hypothesis.shape == (2, 3)
    model = built(RUN, VARIANTS[BOTH], 4, 0.0).eval()
    with torch.no_grad():
        assert torch.allclose(model(*less[:4]).logits, model(*rows[:4]).logits[1:], atol=1e-5)
