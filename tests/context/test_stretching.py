"""Extensions beside the papers, both ways; divisors that are searched; what is refused at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from qkv.cli import app
from qkv.context import context
from qkv.context.extend import Stretch, chosen, extended
from qkv.context.order import SAID_BY, TUNED, UNTUNED, Pair, pairs, verdict
from qkv.context.search import BEYOND, Divisors, divided, known, search
from qkv.context.stretching import Methods, stretches
from qkv.errors import RequestError, UnsupportedError
from qkv.spec import Model, Rotary
from qkv.spec.rotary import Divided, inverse_frequencies
from tests.engine.tiny import save_llama, spec

BY = Stretch(4.0, 1024, 4096)

# --- beside the papers --------------------------------------------------------------------------


def made_up(**changed: float) -> dict[str, tuple[float, ...]]:
    """Losses of four stretches as the papers would have them, to which some are changed."""
    losses = {"none": 8.0, "linear": 3.3, "ntk": 3.1, "dynamic": 3.1, "yarn": 3.0, "longrope": 2.9} | changed
    hard = (0.0, 0.5, -0.5, 0.1)  # a stretch that is hard is so with every method
    return {kind: tuple(loss + more for more in hard) for kind, loss in losses.items()}


def differing(losses: Mapping[str, tuple[float, ...]]) -> set[tuple[str, str]]:
    return {(pair.better, pair.worse) for pair in pairs(losses) if pair.differs}


def test_what_the_papers_rank() -> None:
    """H12, without training: YaRN and NTK before PI, none last; tuned: PI and YaRN alike, before NTK."""
    kinds = ["none", "linear", "ntk", "dynamic", "yarn", "longrope"]
    ranked = set(UNTUNED.pairs(kinds))
    assert {("yarn", "linear"), ("ntk", "linear"), ("linear", "none"), ("longrope", "yarn")} <= ranked
    assert ("ntk", "yarn") not in ranked and ("yarn", "ntk") not in ranked
    assert len(ranked) == 5 + 3 * 2 + 1
    tuned = set(TUNED.pairs(kinds))
    assert {("linear", "ntk"), ("yarn", "ntk")} <= tuned and ("linear", "yarn") not in tuned
    assert set(SAID_BY) == set(kinds) - {"none"}


def test_an_order_as_in_the_papers_is_said_to_be_so() -> None:
    found = list(verdict(made_up()))
    assert found[0] == "Here, the best first: longrope, yarn, ntk, dynamic, linear, none."
    assert found[1].endswith("longrope, then ntk and dynamic and yarn, then linear, then none.")
    assert found[2] == "In the papers' order: 12 of 12 pairs that they rank."
    assert "linear and yarn, then ntk" in found[3] and "was not done here" in found[3]


def test_where_the_order_differs_it_is_said_with_the_paper() -> None:
    losses = made_up(linear=2.95)
    assert differing(losses) == {("ntk", "linear"), ("dynamic", "linear"), ("yarn", "linear")}
    said = "\n".join(verdict(losses))
    assert (
        "They differ: linear is better than ntk here, by 0.150 +- 0.000 nats; in bloc97 2023 it is worse."
    ) in said
    assert "9 of 12 pairs" in said
    assert differing(made_up(none=3.2)) == {("linear", "none")}
    assert ("longrope", "yarn") in differing(made_up(longrope=4.0))


def test_what_is_not_told_apart_is_no_difference() -> None:
    losses = made_up(linear=3.095)  # 0.005 below NTK
    assert not differing(losses)
    said = "\n".join(verdict(losses))
    assert "not told apart here (by how many nats): ntk and linear (-0.005 +- 0.000), dynamic and" in said


def test_a_difference_within_two_errors_is_none() -> None:
    """Gains of 1 and -2: -0.5 on average, with a standard error of 1.5."""
    (pair,) = pairs({"linear": (3.0, 5.0), "ntk": (2.0, 7.0)})
    assert (pair.better, pair.gain, pair.error) == ("ntk", -0.5, pytest.approx(1.5))
    assert pair.alike and not pair.differs
    assert Pair("ntk", "linear", -0.5, 0.2).differs and Pair("ntk", "linear", 0.5, 0.2).holds


def test_a_stand_in_is_told_of_and_not_ranked(folder: Path) -> None:
    said = str(context(folder, texts=1, times=1, extend=["longrope", "ntk"]))
    assert "a stand-in: NTK's divisors, none searched; temperature" in said
    assert "longrope is a stand-in here and not set beside the papers" in said
    assert "of 1 pairs that they rank" in said  # ntk and none


def test_stretches_are_means_of_their_parts() -> None:
    assert stretches(np.arange(512.0)) == (127.5, 383.5)
    assert stretches(np.arange(10.0)) == (4.5,)


# --- LongRoPE's divisors ------------------------------------------------------------------------


def loss_of(wanted: np.ndarray):  # type: ignore[no-untyped-def]
    """How far a model's divisors are from some."""

    def loss(model: Model) -> float:
        (position,) = {m.position for m in model.trunk.mixers() if hasattr(m, "position")}
        assert isinstance(position, Rotary) and isinstance(position.scaling, Divided)
        return float(np.square(np.log(position.scaling.divisors) - np.log(wanted)).sum())

    return loss


def test_known_divisors_are_what_the_methods_amount_to() -> None:
    """Of a base of 100 and six dims: three pairs."""
    (linear,) = known(spec(), "linear", BY)
    assert (linear.theta, linear.dims) == (100.0, 6) and linear.values == pytest.approx([4, 4, 4])
    (ntk,) = known(spec(), "ntk", BY)
    assert ntk.values == pytest.approx([1, 2, 4], rel=1e-6)  # 4^(2i / (6 - 2))
    (yarn,) = known(spec(), "yarn", BY)
    assert yarn.values[0] == pytest.approx(1) and max(yarn.values) <= 4.0001


def test_a_search_comes_nearer_than_what_is_known_and_stays_in_order() -> None:
    wanted = np.array([1.2, 3.0, 3.1])
    found = search(spec(), BY, 60, loss_of(wanted))
    assert set(found.known) == {"linear", "ntk", "yarn"} and found.tried == 60
    assert found.loss < 0.2 * min(found.known.values())
    (best,) = found.divisors
    assert list(best.values) == sorted(best.values)
    assert best.values[0] >= 1 and best.values[-1] <= BEYOND * 4
    assert found == search(spec(), BY, 60, loss_of(wanted))  # seeded


def test_where_nothing_better_is_found_the_best_known_list_stays() -> None:
    found = search(spec(), BY, 10, loss_of(np.array([4.0, 4.0, 4.0])))
    assert found.loss == found.known["linear"] and found.divisors == known(spec(), "linear", BY)


def test_searched_divisors_are_those_the_model_turns_by() -> None:
    model = divided(spec(), [Divisors(100.0, 6, (1.0, 1.5, 3.0))], BY)
    assert model.decoder is not None
    position = model.decoder.layers[0].sublayers[0].branches[0].mixer.position  # type: ignore[union-attr]
    values, factor = position.scaling.frequencies(100.0, 6, 4096)
    assert values == pytest.approx(inverse_frequencies(100.0, 6) / [1, 1.5, 3])
    assert factor == pytest.approx((1 + np.log(4) / np.log(1024)) ** 0.5)  # D18b


def test_a_search_reads_another_part_of_the_text_and_is_reported(folder: Path, tmp_path: Path) -> None:
    asked = ["context", str(folder), "--texts", "1", "--times", "1", "--json"]
    done = CliRunner().invoke(app, [*asked, "--extend", "longrope", "--search", "5"])
    assert done.exit_code == 0, done.output
    (one,) = [each for each in json.loads(done.stdout.splitlines()[-1])["extensions"] if each["searched"]]
    assert one["kind"] == "longrope" and not one["stands_in"]
    assert one["searched"]["tried"] == 5 and one["words"].startswith(
        "the best of 5 lists of divisors on 1,280"
    )
    (divisors,) = one["searched"]["divisors"]
    assert (divisors["theta"], divisors["dims"], len(divisors["values"])) == (10000.0, 6, 3)
    text = tmp_path / "text.txt"
    text.write_text("cat and dog " * 120)  # 1,440 tokens: enough for a text of 1,280, not for a second one
    with pytest.raises(RequestError, match="The text has 1,440 tokens and 2,560 are needed"):
        context(folder, text=text, extend=["longrope"], search=5)


# --- what is refused at once --------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_llama(tmp_path / "model", max_position_embeddings=640)
    return tmp_path / "model"


def test_methods_are_named_once_and_all_are_all() -> None:
    assert chosen(["yarn", "ntk", "yarn"]) == ["yarn", "ntk"]
    assert chosen(["yarn", "all"]) == ["linear", "ntk", "dynamic", "yarn", "longrope"]
    with pytest.raises(RequestError, match="extend is 'yarm'"):
        chosen(["all", "yarm"])


def test_what_is_wrong_is_said_before_anything_is_measured(folder: Path) -> None:
    def told(what: str) -> None:
        raise AssertionError(what)

    for asked, words in (
        ({"extend": ["yarm"]}, "extend is 'yarm'"),
        ({"extend": ["yarn"], "search": 9}, "it goes with extend longrope"),
        ({"extend": ["longrope"], "search": 3}, "search is 3; 3 lists are known"),
        ({"extend": ["ntk"], "factor": 0.5}, "must be above 1"),
    ):
        with pytest.raises(RequestError, match=words):
            context(folder, **asked, told=told)  # type: ignore[arg-type]
    slowed = extended(spec(), "ntk", 2.0, 512, 1024)
    with pytest.raises(UnsupportedError, match="slowed already"):
        Methods(["yarn"], replace(BY, factor=2.0)).check(slowed)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["--budget", "256", "--texts", "2"], "--texts would do nothing beside --budget"),
        (["--budget", "256", "--factor", "2"], "--factor would do nothing beside --budget"),
        (["--budget", "256", "--extend", "all", "--factor", "4"], "--extend and --factor would do nothing"),
        (["--budget", "256", "--search", "9"], "--search would do nothing beside --budget"),
        (["--factor", "4"], "say how --extend extends"),
        (["--search", "9"], "say how --extend extends"),
        (["--encoder", "minilm"], "go with --budget"),
    ],
)
def test_options_that_would_do_nothing_are_refused(asked: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["context", "nowhere", *asked])
    assert isinstance(done.exception, RequestError) and words in str(done.exception)
