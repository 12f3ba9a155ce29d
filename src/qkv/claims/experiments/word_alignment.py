"""H5: decomposable attention on sentences from templates, and on the SICK sentences (Marelli et al. 2014).

Two kinds of pairs, half of each, 20,000 in training, none of
them in the test. Of words: a quantifier, a noun of a small taxonomy and
a verb of another, negated or not, "some poodles do not run": what follows is found by going through all
ways in which the sets could lie (no set of the nouns is empty), and a third of the pairs has each label. Of
order: "dogs chase cats" as premise, the same or agent and patient swapped as hypothesis. The first follows,
the second is open, and the words of both are the same; in the test each premise comes with both, so that
who cannot see order is right in exactly half.

Three variants of one network: without attention inside a sentence, with it and its biases by distance, and
with it but the biases held at 0, which leaves it as blind as without. All is as in section 5.1 of Parikh et
al. but for the size (64), first weights of variance 1 / inputs (1 for the biases by distance, which have
one), Adam with a cosine, no dropout on templates, and word vectors: GloVe's are not here, so every word has
a random one, and what words have to do with each other has to be learned from the pairs. On SICK the first
two variants are trained on its 4,500 pairs; words that only its test has get vectors too.

Changed on the way, on a seed that does not count: with the paper's dropout of 0.2 a width of 64 had not
learned the words in 4,000 steps; with the biases by distance starting at 0 order stayed at chance for all of
the training, as nothing told the distances apart to begin with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cache
from itertools import combinations, product
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.charts.pictures import Bar, bars, heat, picture
from qkv.charts.scales import Axis
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.data import text, there_is
from qkv.claims.judging import spread, within
from qkv.claims.models import initialise
from qkv.claims.training import adam, cosine, train, warm_up
from qkv.lineage.decomposable import DecomposableAttention, Settings

LABELS = ("entailment", "neutral", "contradiction")
FOLLOWS, OPEN, EXCLUDED = range(3)
NOUNS = {  # each with what is above it; two of which neither is above the other share nothing
    "animals": "",
    "dogs": "animals",
    "cats": "animals",
    "birds": "animals",
    "poodles": "dogs",
    "terriers": "dogs",
    "siamese": "cats",
    "persians": "cats",
    "sparrows": "birds",
    "eagles": "birds",
}
VERBS = {  # two of which neither is above the other may both be true, or not
    "move": "",
    "walk": "move",
    "run": "move",
    "fly": "move",
    "stroll": "walk",
    "sprint": "run",
    "eat": "",
    "sing": "",
}
ACTS = (
    *("chase", "see", "follow", "bite", "hear", "like", "avoid", "help"),
    *("watch", "lead", "fear", "trust", "guard", "tease", "greet", "miss"),
)
QUANTIFIERS = ("all", "some", "no")
WIDTH, BATCH = 64, 64
Sentence = tuple[str, str, bool, str]  # quantifier, noun, whether the verb is affirmed, verb


class Pair(NamedTuple):
    premise: str
    hypothesis: str
    label: int


EXAMPLE = Pair("no dogs move", "some poodles do not sprint", FOLLOWS)


class Variant(NamedTuple):
    """How far attention inside a sentence tells distances apart, None without it; and if it does at all."""

    far: int | None = None
    distance: bool = True


PLAIN, BOTH, CONTENT = "no intra-attention", "intra-attention, distances", "intra-attention, no distances"
VARIANTS = {PLAIN: Variant(), BOTH: Variant(10), CONTENT: Variant(10, distance=False)}
ON_SICK = (PLAIN, BOTH)


def under(word: str, other: str, tree: dict[str, str]) -> bool:
    """Whether `other` is the word itself or above it."""
    return word == other or (bool(word) and under(tree.get(word, ""), other, tree))


def label_of(premise: Sentence, hypothesis: Sentence) -> int:
    """By trying all sets of kinds of individuals that there could be."""
    quantifier, noun, affirmed, verb = premise
    other_quantifier, other, other_affirmed, also = hypothesis
    return label(quantifier, affirmed, other_quantifier, other_affirmed, kinds(noun, other, verb, also))


Kind = tuple[
    bool, bool, bool, bool
]  # of the premise's noun, of the other, its verb true of it, and the other


@cache
def kinds(noun: str, other: str, verb: str, also: str) -> tuple[Kind, ...]:
    """Which there may be, of those that either sentence is about."""
    apart = not under(noun, other, NOUNS) and not under(other, noun, NOUNS)
    return tuple(
        (a, b, v, w)
        for a, b, v, w in product((True, False), repeat=4)
        if (a or b) and not (a and b and apart)
        if not_against(noun, other, a, b, NOUNS) and not_against(verb, also, v, w, VERBS)
    )


@cache
def label(quantifier: str, affirmed: bool, other: str, also: bool, possible: tuple[Kind, ...]) -> int:
    outcomes = set()
    for there in product((True, False), repeat=len(possible)):
        world = [kind for kind, is_there in zip(possible, there, strict=True) if is_there]
        of_noun, of_other = [v for a, _, v, _ in world if a], [w for _, b, _, w in world if b]
        if of_noun and of_other and holds(quantifier, affirmed, of_noun):
            outcomes.add(holds(other, also, of_other))
    return OPEN if len(outcomes) == 2 else FOLLOWS if outcomes == {True} else EXCLUDED


def not_against(one: str, other: str, a: bool, b: bool, tree: dict[str, str]) -> bool:
    """Whether something may be `one` or not (a), and `other` or not (b)."""
    return (b or not a or not under(one, other, tree)) and (a or not b or not under(other, one, tree))


def holds(quantifier: str, affirmed: bool, verbs: list[bool]) -> bool:
    """Whether it is true where the verb is true or not of the noun's individuals, of which there are some."""
    said = [verb == affirmed for verb in verbs]
    return {"all": all(said), "some": any(said), "no": not any(said)}[quantifier]


def worded(sentence: Sentence) -> str:
    quantifier, noun, affirmed, verb = sentence
    return f"{quantifier} {noun} {verb if affirmed else f'do not {verb}'}"


def of_words(random: Random, count: int, but: Collection[Pair] = ()) -> list[Pair]:
    """As many of each label, but for one or two, and none of `but`."""

    def drawn() -> Sentence:
        affirmed = random.random() < 0.7
        return random.choice(QUANTIFIERS), random.choice(list(NOUNS)), affirmed, random.choice(list(VERBS))

    found: list[Pair] = []
    while len(found) < count:
        premise, hypothesis = drawn(), drawn()
        if label_of(premise, hypothesis) == len(found) % len(LABELS):
            pair = Pair(worded(premise), worded(hypothesis), len(found) % len(LABELS))
            found += [] if pair in but else [pair]
    return found


def of_order(random: Random, held: int) -> tuple[list[Pair], list[Pair]]:
    """All pairs of the test and all of the training, from so many and all other choices of two and an act.

    Each premise stands with itself and with its agent and patient swapped.
    """
    chosen = [(*two, act) for two in combinations(NOUNS, 2) for act in ACTS]
    random.shuffle(chosen)

    def pairs(triples: Sequence[tuple[str, str, str]]) -> list[Pair]:
        found = []
        for one, other, act in triples:
            a, b = f"{one} {act} {other}", f"{other} {act} {one}"
            found += [Pair(a, a, FOLLOWS), Pair(a, b, OPEN), Pair(b, b, FOLLOWS), Pair(b, a, OPEN)]
        return found

    return pairs(chosen[:held]), pairs(chosen[held:])


def sick(name: str, limit: int | None) -> list[Pair]:
    """Sentences of SICK and their label, in lower case."""
    lines = [line.split("\t") for line in text(name).splitlines()[1:]]
    return [
        Pair(line[1].lower(), line[2].lower(), LABELS.index(line[4].strip().lower()))
        for line in lines[:limit]
    ]


class Rows(NamedTuple):
    """Pairs as numbers of words, padded on the right."""

    premise: Tensor  # (pairs, words)
    hypothesis: Tensor
    premise_present: Tensor
    hypothesis_present: Tensor
    labels: Tensor  # (pairs,)


def rows_of(pairs: Sequence[Pair], words: dict[str, int]) -> Rows:
    def numbers(sentences: Sequence[str]) -> tuple[Tensor, Tensor]:
        found = [[words[word] for word in sentence.split()] for sentence in sentences]
        longest = max(map(len, found))
        there = torch.tensor([[i < len(row) for i in range(longest)] for row in found])
        return torch.tensor([row + [0] * (longest - len(row)) for row in found]), there

    premise, premise_present = numbers([pair.premise for pair in pairs])
    hypothesis, hypothesis_present = numbers([pair.hypothesis for pair in pairs])
    labels = torch.tensor([pair.label for pair in pairs])
    return Rows(premise, hypothesis, premise_present, hypothesis_present, labels)


def vocabulary(pairs: Sequence[Pair]) -> dict[str, int]:
    words = {word for pair in pairs for word in (*pair.premise.split(), *pair.hypothesis.split())}
    return {word: place for place, word in enumerate(sorted(words))}


def built(run: Run, variant: Variant, vocab: int, dropout: float) -> DecomposableAttention:
    model = DecomposableAttention(
        Settings(vocab=vocab, vectors=WIDTH, width=WIDTH, far=variant.far, dropout=dropout)
    )
    draw = run.generator("weights")
    model.use_vectors(torch.randn(vocab, WIDTH, generator=draw))
    model.null.copy_(F.normalize(torch.randn(WIDTH, generator=draw), dim=0))
    initialise(model, draw)
    if model.intra is not None and variant.distance:
        nn.init.normal_(model.intra.distance, generator=draw)  # one input each: of variance 1
    elif model.intra is not None:  # at 0, where `initialise` puts them, they tell no places apart
        model.intra.distance.requires_grad_(False)
    return model


class Course(NamedTuple):
    """How long a training lasts and what it drops; a small real set needs the paper's dropout."""

    epochs: int
    dropout: float


TEMPLATES, REAL = Course(10, 0.0), Course(10, 0.2)


def trained(
    run: Run, variant: Variant, rows: Rows, words: dict[str, int], course: Course, note: str
) -> DecomposableAttention:
    model, draw = built(run, variant, len(words), course.dropout), run.generator("batches")
    torch.manual_seed(run.number("dropout"))
    steps = run.of(course.epochs * len(rows.labels) // BATCH, 3)

    def batches() -> Iterator[Rows]:
        while True:
            for chosen in torch.randperm(len(rows.labels), generator=draw).split(BATCH):
                yield Rows(*(part[chosen] for part in rows))

    def loss(batch: Rows) -> Tensor:
        return model.losses(model(*cropped(batch)[:4]), batch.labels).mean()

    schedule = warm_up(steps // 20 + 1, cosine(steps))
    train(model, batches(), loss, steps, adam(model, 2e-3), schedule=schedule, told=run.progress, note=note)
    return model


def cropped(rows: Rows) -> Rows:
    """Without the places at the end where none of them has a word: SICK's longest sentence is very long."""
    one, other = (int(there.sum(1).max()) for there in rows[2:4])
    premise, hypothesis, of_premise, of_hypothesis, labels = rows
    return Rows(
        premise[:, :one], hypothesis[:, :other], of_premise[:, :one], of_hypothesis[:, :other], labels
    )


@torch.no_grad()
def right(model: DecomposableAttention, rows: Rows) -> float:
    """The share of pairs whose label is the likeliest."""
    return float((model(*rows[:4]).logits.argmax(-1) == rows.labels).float().mean())


def measure(run: Run) -> Figures:
    random, half = Random(run.number("pairs")), run.of(10_000, 60)
    words_known = of_words(random, half)
    order_test, order_known = of_order(random, run.of(120, 15))
    known = words_known + random.choices(order_known, k=half)
    tests = {"words": of_words(random, run.of(2000, 60), set(words_known)), "order": order_test}
    words = vocabulary([*known, *tests["words"], *order_test, EXAMPLE])
    training = rows_of(known, words)
    found: Figures = {"sick": on_sick(run)}
    for name, variant in VARIANTS.items():
        model = trained(run, variant, training, words, TEMPLATES, name)
        found[name] = {part: right(model, rows_of(pairs, words)) for part, pairs in tests.items()}
        found[name]["example"] = aligned(model, words)
    return found


def on_sick(run: Run) -> Figures | None:
    """The share of the test's pairs that are right, and of its commonest label; None where it is not here."""
    if not (there_is("sick-train") and there_is("sick-test")):
        return None
    known, test = (sick(name, run.of(None, 60)) for name in ("sick-train", "sick-test"))
    words = vocabulary([*known, *test])
    rows = rows_of(test, words)
    found: Figures = {"majority": float(torch.bincount(rows.labels).max() / len(rows.labels))}
    for name in ON_SICK:
        model = trained(run, VARIANTS[name], rows_of(known, words), words, REAL, f"SICK, {name}")
        found[name] = right(model, rows)
    return found


@torch.no_grad()
def aligned(model: DecomposableAttention, words: dict[str, int]) -> list[list[float]]:
    """What each word of EXAMPLE's premise is aligned with in its hypothesis, NULL the first of both."""
    return model(*rows_of([EXAMPLE], words)[:4]).to_hypothesis[0].tolist()


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    def of(name: str, what: str) -> list[float | None]:
        return [100 * each[name][what] for each in figures]

    checks = [
        *(
            within(f"{name}: over 95 % on words", of(name, "words"), 95, 100, ".1f", " %")
            for name in VARIANTS
        ),
        *(
            within(f"{name}: exactly half on order", of(name, "order"), 49.95, 50.05, ".2f", " %")
            for name in (PLAIN, CONTENT)
        ),
        within(f"{BOTH}: over 95 % on order", of(BOTH, "order"), 95, 100, ".1f", " %"),
    ]
    return (*checks, *(over_majority(figures, name) for name in ON_SICK))


def over_majority(figures: Sequence[Figures], name: str) -> Check:
    """On SICK, in every seed."""
    what = f"{name}: on SICK more is right than by its commonest label"
    known = [each["sick"] for each in figures if each["sick"] is not None]
    if len(known) < len(figures):
        return Check(what, "not measured: SICK is not on this machine", False)
    shares, most = [100 * each[name] for each in known], [100 * each["majority"] for each in known]
    measured = f"{spread(shares, '.1f', ' %')} against {spread(most, '.1f', ' %')}"
    return Check(what, measured, all(one > other for one, other in zip(shares, most, strict=True)))


def draw(figures: Sequence[Figures]) -> Pictures:
    def rows(what: str) -> list[Bar]:
        return [Bar(name, [100 * each[name][what] for each in figures]) for name in VARIANTS]

    panels = [
        bars("Pairs of words", rows("words"), Axis("% right", high=100, marks={"chance": 100 / 3})),
        bars("Agent and patient", rows("order"), Axis("% right", high=100, marks={"chance": 50})),
    ]
    known = [each["sick"] for each in figures if each["sick"] is not None]
    if known:
        shares = [Bar(name, [100 * each[name] for each in known]) for name in ON_SICK]
        marks = {"commonest label": 100 * known[0]["majority"]}
        panels.append(bars("SICK", shares, Axis("% right", high=100, marks=marks)))
    down, across = (["NULL", *words.split()] for words in (EXAMPLE.premise, EXAMPLE.hypothesis))
    looked = figures[0][PLAIN]["example"]
    return {
        "accuracy": picture(*panels),
        "alignment": picture(
            heat(f"{PLAIN}: what is aligned with what", looked, down, across, "premise", "hypothesis")
        ),
    }
