"""Behaviour over many prompts: each number is that of a run by hand, and the change is paired."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from qkv.cli import app
from qkv.errors import RequestError, SourceError, UnsupportedError
from qkv.explanation import Case, measure_behaviour, read_cases
from qkv.explanation.behaviour import paired
from qkv.explanation.pages import cases_page
from qkv.explanation.scoring import candidate, named
from qkv.model import Model
from tests.engine.tiny import byte_tokenizer, greedily, save_llama, tiny
from tests.explanation.kinds import MASK, SEP, WORDS, model as kind


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny(seed=4)


def told(model: Model, prompt: str, answer: str) -> float:
    """The log-probability of an answer, from one pass over both."""
    before, whole = (byte_tokenizer().encode(text) for text in (prompt, prompt + answer))
    with torch.no_grad():
        shares = model(torch.tensor([whole]))[0].double().log_softmax(-1)
    return sum(float(shares[i - 1, whole[i]]) for i in range(len(before), len(whole)))


CHOICES = [" x", " yes", " no", "zz"]


def test_the_choice_of_highest_log_probability_is_taken(model: Model) -> None:
    lines = [{"prompt": "a b", "answer": answer, "choices": CHOICES} for answer in CHOICES]
    found = measure_behaviour(model, lines)
    told_by = [told(model, "a b", choice) for choice in CHOICES]
    assert [one.own.logprob for one in found.answered] == pytest.approx(told_by, abs=1e-5)
    best = max(range(4), key=told_by.__getitem__)
    assert [one.own.right for one in found.answered] == [i == best for i in range(4)]
    assert {one.own.chosen for one in found.answered} == {CHOICES[best]}
    assert found.accuracy.own == 0.25 and found.accuracy.change is None
    assert found.logprob.own == pytest.approx(sum(told_by) / 4, abs=1e-5)


PROMPTS = [a + b for a in "abcdefghij" for b in "klmnopqrst"]


def spoken(model: Model, prompt: str) -> tuple[str, str]:
    """What the model says, two tokens, one pass for each."""
    return prompt, byte_tokenizer().decode(greedily(model, byte_tokenizer().encode(prompt), 2)[0])


def test_without_choices_each_token_must_be_the_likeliest(model: Model) -> None:
    prompt, greedy = next(found for found in map(partial(spoken, model), PROMPTS) if found[1].isalnum())
    other = greedy[:-1] + ("q" if greedy[-1] != "q" else "r")
    found = measure_behaviour(
        model, [{"prompt": prompt, "answer": each} for each in (greedy, other, greedy[:1])]
    )
    assert [one.own.right for one in found.answered] == [True, False, True]
    assert found.accuracy.own == pytest.approx(2 / 3)
    assert found.answered[0].own.logprob == pytest.approx(told(model, prompt, greedy), abs=1e-5)


def test_against_is_the_one_other_choice(model: Model) -> None:
    one = {"prompt": "a b", "answer": " x", "against": " yes"}
    same = {"prompt": "a b", "answer": 0, "choices": [" x", " yes"]}
    (a, b) = measure_behaviour(model, [one, same]).answered
    assert a == b and a.case == Case("a b", " x", (" x", " yes"))


def test_an_answer_that_joins_the_prompts_last_token_is_scored_as_both_are_read(model: Model) -> None:
    """ "xA" and "B" are the tokens x, AB: the place behind x tells AB."""
    ids = byte_tokenizer().encode("xAB")
    assert byte_tokenizer().encode("xA")[:2] != ids[:2] and len(ids) == 2
    found = candidate(model, "xA", "B")
    assert found == ((ids[0],), (), 0, (ids[1],))
    with torch.no_grad():
        wanted = float(model(torch.tensor([ids[:1]]))[0, 0].double().log_softmax(-1)[ids[1]])
    scored = measure_behaviour(model, [{"prompt": "xA", "answer": "B"}]).answered[0].own
    assert scored.logprob == pytest.approx(wanted, abs=1e-5)


CASES = [
    Case("the cat", " sat"),
    Case("a b c", " x"),
    Case("AB hello", "de", ("de", "fg")),
    Case("the dog", " s"),
]


@pytest.mark.parametrize("by", ["zero", "mean"])
def test_parts_are_taken_out_of_every_case(model: Model, by: str) -> None:
    without = ("layer 0 head 2", "layer 1 feed-forward")
    found = measure_behaviour(model, CASES, without, by)
    texts = [case.prompt + str(choice) for case in CASES for choice in case.candidates]
    inputs = dict.fromkeys(tuple(byte_tokenizer().encode(text)[:-1]) for text in texts)
    seen: dict[str, list[Tensor]] = {"layers.0.attention.heads": [], "layers.1.feed_forward.output": []}
    for tokens in inputs:
        with torch.no_grad(), model.tap(list(seen)) as taps:
            model(torch.tensor([list(tokens)]))
        for point, values in seen.items():
            values.append(taps[point][0])
    means = {point: torch.cat(values).mean(0) * (by == "mean") for point, values in seen.items()}

    def head(value: Tensor) -> Tensor:
        value = value.clone()
        value[:, :, 2] = means["layers.0.attention.heads"][2]
        return value

    changes = {
        "layers.0.attention.heads": head,
        "layers.1.feed_forward.output": lambda x: means["layers.1.feed_forward.output"].expand(x.shape),
    }
    for one in found.answered:
        with model.tap(changes):
            wanted = told(model, one.case.prompt, str(one.case.answer))
        assert one.changed is not None and one.changed.logprob == pytest.approx(wanted, abs=1e-5)
        assert one.own.logprob == pytest.approx(told(model, one.case.prompt, str(one.case.answer)), abs=1e-5)
    differences = [one.changed.logprob - one.own.logprob for one in found.answered if one.changed]
    assert found.logprob.change == pytest.approx(sum(differences) / 4)
    mean = sum(differences) / 4
    deviation = math.sqrt(sum((d - mean) ** 2 for d in differences) / 3)
    assert found.logprob.spread == pytest.approx(deviation / 2)
    assert found.without == without and abs(mean) > 0.01


def test_the_change_is_paired() -> None:
    """Changes 0, 1, 0, 1: mean 1/2, standard deviation sqrt(1/3), of the mean sqrt(1/12)."""
    found = paired([0.0, 0.0, 5.0, 7.0], [0.0, 1.0, 5.0, 8.0])
    assert (found.own, found.changed, found.change) == (3.0, 3.5, 0.5)
    assert found.spread == pytest.approx(math.sqrt(1 / 12))
    assert paired([2.0], [3.0]).spread is None and paired([2.0, 4.0]).change is None


def test_a_masked_language_model_fills_its_mask() -> None:
    bert = kind("masked")
    ids = bert.encode("the [MASK] sat .")
    with torch.no_grad():
        shares = bert(torch.tensor([ids]))[0, ids.index(MASK)].double().log_softmax(-1)
    lines = [
        {"prompt": "the [MASK] sat .", "answer": word, "choices": ["cat", "dog"]} for word in ("cat", "dog")
    ]
    found = measure_behaviour(bert, lines).answered
    wanted = [float(shares[WORDS.index(word)]) for word in ("cat", "dog")]
    assert [one.own.logprob for one in found] == pytest.approx(wanted, abs=1e-5)
    assert [one.own.right for one in found] == [wanted[0] > wanted[1], wanted[1] > wanted[0]]
    with pytest.raises(RequestError, match=r"Case 1: A mask stands for one token, and 'cat dog' makes 2\."):
        measure_behaviour(bert, [{"prompt": "the [MASK] sat .", "answer": "cat dog"}])


def test_a_classifier_says_the_number_of_a_class() -> None:
    bert = kind("class")
    with torch.no_grad():
        shares = bert(torch.tensor([bert.encode("the cat")]))[0].double().log_softmax(-1)
    found = measure_behaviour(bert, [{"prompt": "the cat", "answer": i} for i in range(3)], ["layer 1"])
    assert [one.own.logprob for one in found.answered] == pytest.approx(shares.tolist(), abs=1e-5)
    assert [one.own.right for one in found.answered] == [i == int(shares.argmax()) for i in range(3)]
    assert found.turned in ((0, 0), (1, 1))
    with pytest.raises(RequestError, match=r"Case 1: 3 is not one of this model's 3 answers\."):
        measure_behaviour(bert, [{"prompt": "the cat", "answer": 3}])


def test_an_encoder_decoder_answers_the_prompt() -> None:
    bart = kind("pair")
    source = torch.tensor([bart.encode("the cat ran")])
    answer = [WORDS.index(word) for word in ("a", "dog")]
    changes = {"decoder.layers.1.cross.heads": lambda x: x * torch.tensor([1.0, 0, 1, 1])[:, None]}

    def by_hand() -> float:
        with torch.no_grad():
            shares = bart(torch.tensor([[SEP, answer[0]]]), source)[0].double().log_softmax(-1)
        return float(shares[0, answer[0]] + shares[1, answer[1]])

    found = measure_behaviour(
        bart, [{"prompt": "the cat ran", "answer": "a dog"}], ["decoder layer 1 cross head 1"]
    ).answered[0]
    assert found.own.logprob == pytest.approx(by_hand(), abs=1e-5)
    with bart.tap(changes):
        assert found.changed is not None and found.changed.logprob == pytest.approx(by_hand(), abs=1e-5)
    assert abs(found.changed.logprob - found.own.logprob) > 1e-3


FORMS: list[tuple[dict[str, Any], Case]] = [
    (
        {"question": "Two?", "choices": ["1", "2"], "answer": 1},
        Case("Question: Two?\nAnswer:", " 2", (" 1", " 2")),
    ),
    (
        {"question": "Two?", "choices": ["1", "2"], "answer": "B"},
        Case("Question: Two?\nAnswer:", " 2", (" 1", " 2")),
    ),
    (
        {"question": "Two?", "choices": ["B", "A"], "answer": "A"},
        Case("Question: Two?\nAnswer:", " A", (" B", " A")),
    ),
    (
        {"question": "Two?", "choices": {"text": ["2", "1"], "label": ["1", "2"]}, "answerKey": "1"},
        Case("Question: Two?\nAnswer:", " 2", (" 2", " 1")),
    ),
    ({"question": "Two?", "answer": "2"}, Case("Question: Two?\nAnswer:", " 2")),
    ({"prompt": "1 + 1 =", "answer": " 2", "id": 7}, Case("1 + 1 =", " 2")),
]


@pytest.mark.parametrize(("line", "case"), FORMS)
def test_cases_are_read_as_they_are_written(tmp_path: Path, line: dict[str, Any], case: Case) -> None:
    file = tmp_path / "cases.jsonl"
    file.write_text("\n" + json.dumps(line) + "\n\n")
    assert read_cases(file) == [case]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "Line 2 is not JSON: Expecting property name enclosed in double quotes."),
        ("[1]", "Line 2: a case is an object."),
        ('{"answer": "x"}', 'Line 2: a case has a "prompt" or a "question".'),
        ('{"prompt": "x"}', 'Line 2: "answer" is a text, or the number of a choice or class.'),
        ('{"prompt": 3, "answer": "x"}', 'Line 2: "prompt" is a text.'),
        (
            '{"prompt": "x", "answer": "y", "choices": ["a"]}',
            "Line 2: the answer 'y' is none of the 1 choices.",
        ),
        ('{"prompt": "x", "answer": "y", "choices": "ab"}', "Line 2: choices are a list of texts."),
        ('{"prompt": "x", "answer": "y", "choices": ["y", "y"]}', "Line 2: the same choice is there twice."),
        (
            '{"prompt": "x", "answer": "y", "choices": ["y"], "against": "z"}',
            'Line 2: "against" is the one other choice: leave it or "choices" out.',
        ),
        (
            '{"question": "x", "answer": 2, "choices": ["y"]}',
            "Line 2: the answer 2 is none of the 1 choices.",
        ),
    ],
)
def test_a_line_that_is_no_case_is_named(tmp_path: Path, line: str, sentence: str) -> None:
    file = tmp_path / "cases.jsonl"
    file.write_text(f'{{"prompt": "x", "answer": "y"}}\n{line}\n')
    with pytest.raises(RequestError) as problem:
        read_cases(file)
    assert str(problem.value) == sentence


def test_parts_are_named_as_one_says_them(model: Model) -> None:
    def points(one: Model, name: str) -> list[tuple[str, Any]]:
        return [(part.point, part.where) for part in named(one, name)]

    assert points(model, "layer 1  Head 3") == [("layers.1.attention.heads", (slice(None), 3))]
    assert points(model, "layer 0 attention") == [("layers.0.attention.output", ())]
    assert points(model, "layer 0") == [
        ("layers.0.attention.output", ()),
        ("layers.0.feed_forward.output", ()),
    ]
    bart = kind("pair")
    assert points(bart, "encoder layer 1 head 0") == [("encoder.layers.1.attention.heads", (slice(None), 0))]
    assert [point for point, _ in points(bart, "decoder layer 1")] == [
        f"decoder.layers.1.{mixer}.output" for mixer in ("attention", "cross", "feed_forward")
    ]
    for one, name, sentence in (
        (model, "head 3", "is no part: say"),
        (model, "layer 7", "This model has no layer 7"),
        (model, "layer 1 head 4", "This model has no layer 1 head 4: its layer has 4 heads"),
        (model, "layer 1 feed-forward head 1", "a feed-forward has no heads"),
        (model, "encoder layer 1", "leave encoder and decoder out"),
        (bart, "layer 1", "say which: encoder layer 3, or decoder layer 3"),
    ):
        with pytest.raises(RequestError, match=sentence):
            named(one, name)


def test_what_cannot_be_scored_is_refused(model: Model, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no answer that has a probability"):
        measure_behaviour(kind("embedding"), CASES)
    with pytest.raises(RequestError, match="There is no case"):
        measure_behaviour(model, [])
    with pytest.raises(RequestError, match="replaced by zero or mean, not by 'median'"):
        measure_behaviour(model, CASES, ["layer 0"], "median")
    with pytest.raises(RequestError, match=r"Case 1: The answer '' makes no token\."):
        measure_behaviour(model, [{"prompt": "a", "answer": ""}])
    with pytest.raises(
        RequestError, match=r"Case 1: The prompt makes no token that an answer could follow\."
    ):
        measure_behaviour(model, [{"prompt": "", "answer": "a"}])
    with pytest.raises(RequestError, match=r"Case 2: It has 9 tokens, and this model reads 6\."):
        measure_behaviour(
            tiny(context=6), [{"prompt": "a", "answer": "b"}, {"prompt": "a" * 9, "answer": "b"}]
        )
    with pytest.raises(SourceError, match=r"absent\.jsonl cannot be read: No such file"):
        read_cases(tmp_path / "absent.jsonl")


def test_candidates_that_are_read_alike_share_a_pass(model: Model) -> None:
    heard: list[tuple[int, int, str]] = []
    lines = [{"prompt": "a b", "answer": "x", "choices": ["x", "y", "z"]}, {"prompt": "c d", "answer": "x"}]
    measure_behaviour(model, lines, ["layer 0"], "mean", told=lambda *each: heard.append(each))
    assert heard == [(1, 1, "as it is"), (1, 1, "what stands in the place of parts"), (1, 1, "without parts")]


def test_the_command(tmp_path: Path) -> None:
    save_llama(tmp_path / "llama")
    file = tmp_path / "cases.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": case.prompt, "answer": case.answer}) for case in CASES))
    asked = ["explain", str(tmp_path / "llama"), "--behaviour", str(file)]
    without = ["--without", "layer 0 head 1", "--by", "mean"]
    done = CliRunner().invoke(app, [*asked, *without, "--json", "--html", str(tmp_path / "cases.html")])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout.splitlines()[-1])
    import qkv

    found = measure_behaviour(qkv.load(tmp_path / "llama", runtime="torch"), file, ["layer 0 head 1"], "mean")
    assert data == json.loads(json.dumps(found.data(), allow_nan=False))
    assert data["cases"] == 4 and data["logprob"]["spread"] > 0
    text = CliRunner().invoke(app, [*asked, *without]).output
    assert text.rstrip("\n") == str(found)
    assert f"{found.logprob.change:+.3f} nats ± {found.logprob.spread:.3f}" in text
    html = (tmp_path / "cases.html").read_text()
    assert html == cases_page(found) and "https" not in html and "log-probability of the answer" in html
    plain = CliRunner().invoke(app, asked).output
    assert f"{found.logprob.own:9.3f}" in plain and "without" not in plain


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ([], "Give a PROMPT, or a file of them with --behaviour."),
        (["text", "--behaviour", "x"], "Give a PROMPT, or a file of them with --behaviour."),
        (["--behaviour", "x", "--target", "y"], "leave --behaviour out"),
        (["text", "--without", "layer 0"], "--without is of --behaviour"),
        (["--behaviour", "x", "--by", "mean"], "--by of --without"),
    ],
)
def test_options_that_do_not_go_together_are_refused(more: list[str], sentence: str) -> None:
    done = CliRunner().invoke(app, ["explain", "smollm2", *more])
    assert done.exit_code != 0 and sentence in done.output + str(done.exception)
