"""Words of several tokens: where they are, what they are called, and what goes with all of one."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from qkv.cli import app
from qkv.errors import RequestError
from qkv.explanation import Reading, explain
from qkv.explanation.words import places
from qkv.model import Model
from tests.engine.tiny import byte_tokenizer, tiny

PROMPT = "书 and cat, 书!"


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny(seed=4)


def test_a_word_is_found_wherever_it_stands() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(PROMPT)
    assert len(ids) == len(PROMPT.encode())
    assert places(tokenizer, ids, "书") == (0, 1, 2, 13, 14, 15)
    assert places(tokenizer, ids, " cat") == (7, 8, 9, 10)
    assert places(tokenizer, ids, "a") == (4, 9)
    with pytest.raises(RequestError, match="'dog' is not in the prompt"):
        places(tokenizer, ids, "dog")
    with pytest.raises(RequestError, match="has letters"):
        places(tokenizer, ids, " ")


def test_pieces_of_a_character_are_called_by_it(model: Model) -> None:
    ids = byte_tokenizer().encode("a书b")
    assert list(Reading(model, ids).labels(ids)) == ["a", "书 1/3", "书 2/3", "书 3/3", "b"]
    assert list(Reading(model, ids).labels(ids[:3])) == ["a", "\ufffd", "\ufffd"]  # no whole character


def test_a_word_is_taken_out_as_a_whole(model: Model) -> None:
    found = explain(model, PROMPT, target="a", against="b", blank=".", words=("书", "cat"))
    ids = torch.tensor([byte_tokenizer().encode(PROMPT)])
    a, b, stop = (byte_tokenizer().encode(text)[0] for text in "ab.")
    for word, where in zip(found.words, ([0, 1, 2, 13, 14, 15], [8, 9, 10]), strict=True):
        without = ids.clone()
        without[0, where] = stop
        with torch.no_grad():
            own, changed = model(ids)[0, -1], model(without)[0, -1]
        effect = float((own[a] - own[b]) - (changed[a] - changed[b]))
        assert word.places == tuple(where) and word.effect == pytest.approx(effect, abs=1e-5)
        attention = found.attention.values.mean((0, 1))[where].sum()
        assert word.attention == pytest.approx(float(attention), abs=1e-6)
    assert [each["word"] for each in found.data()["words"]] == ["书", "cat"]
    assert f"{'书'!r:<18}{found.words[0].effect:>+9.3f}" in str(found)


def test_an_answer_of_several_tokens_is_told_to_be_its_first(model: Model) -> None:
    found = explain(model, "a", target="书", against="b")
    assert (found.target, found.against) == ("书 (its first token)", "b")
    assert found.metric == "logit of '书 (its first token)' less that of 'b' at place 0"


# The sentence with which the study notes ask what a pronoun refers to, and the same in English: of each the
# effect of the candidates, of the pronoun, and how far attention agrees. In docs/explained.md they are told.
SENTENCES = {
    "en": (
        "Xiao Wang put the book on the table because it was too heavy. What was too heavy? The",
        (" book", " table"),
        {" book": 6.379, " table": -1.689, " it": -0.058},
        -0.008,
    ),
    "zh": (
        "小王把书放在桌上，因为它太重了。太重的是",
        ("书", "桌"),
        {"书": 0.271, "桌": -1.165, "它": -1.015},
        -0.377,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("language", SENTENCES)
def test_what_it_refers_to(language: str) -> None:
    """Of SmolLM2, by the command: as it is told."""
    prompt, (target, against), effects, agrees = SENTENCES[language]
    words = [part for word in effects for part in ("--word", word)]
    asked = ["explain", "smollm2", prompt, "--target", target, "--against", against, *words]
    done = CliRunner().invoke(app, [*asked, "--json", "--threads", "1"])
    found = json.loads(done.stdout.splitlines()[-1])
    assert {each["word"]: each["effect"] for each in found["words"]} == pytest.approx(effects, abs=0.01)
    assert found["agrees"]["attention"] == pytest.approx(agrees, abs=0.02)
