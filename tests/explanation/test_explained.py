"""The whole of an explanation: its parts are those the methods give, and it says how far attention agrees."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import qkv
from qkv.cli import app
from qkv.errors import RequestError
from qkv.explanation import (
    Blank,
    Difference,
    LogProbability,
    Reading,
    ablate,
    attention_maps,
    direct_effects,
    explain,
    occlusion,
    page,
    parts,
    self_repair,
    spearman,
)
from qkv.model import Model
from tests.engine.tiny import byte_tokenizer, save_llama, tiny

PROMPT = "the cat, the cat"


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny(seed=4)


def test_an_explanation_is_what_its_methods_give(model: Model) -> None:
    found = explain(model, PROMPT, target="a", against="b", blank=".")
    ids = [byte_tokenizer().encode(text)[0] for text in ("a", "b", ".")]
    reading, metric = Reading(model, PROMPT), Difference(ids[0], ids[1], len(found.tokens) - 1)
    with torch.no_grad():
        logits = model(torch.tensor([byte_tokenizer().encode(PROMPT)]))[0, -1]
    assert found.value == pytest.approx(float(logits[ids[0]] - logits[ids[1]]), abs=1e-5)
    assert found.probability == pytest.approx(float(logits.softmax(-1)[ids[0]]), abs=1e-6)
    wanted = occlusion(reading, metric, Blank(ids[2]))
    assert found.effects.values == pytest.approx(wanted.values, abs=1e-6)
    assert found.heads.values == pytest.approx(ablate(reading, metric, parts.heads(reading)).values, abs=1e-6)
    seen = attention_maps(reading).at(query=len(found.tokens) - 1).values
    assert found.attention.values == pytest.approx(seen)
    assert found.agrees["attention"] == pytest.approx(spearman(seen.mean((0, 1)), wanted.values))
    assert found.agreement.values[1, 2] == pytest.approx(spearman(seen[1, 2], wanted.values))
    # gradients from the same baseline add up to the way between the two
    off = Reading(model, [ids[2]] * len(found.tokens)).value(metric)
    assert found.gradient.values.sum() == pytest.approx(found.value - float(off[0]), abs=2e-2)


def test_the_likeliest_answer_is_explained_where_none_is_named(model: Model) -> None:
    found = explain(model, PROMPT)
    assert found.target == found.answers[0][0] and found.probability == found.answers[0][1]
    assert found.lens[-1].answer == found.target and found.lens[-1].metric == pytest.approx(found.value)
    assert found.value == pytest.approx(np.log(found.probability), abs=1e-5)
    assert [abs(head.effect) for head in found.best] == sorted(
        (abs(h.effect) for h in found.best), reverse=True
    )


def test_it_says_the_same_twice_and_fits_into_json(model: Model) -> None:
    once, twice = (json.dumps(explain(model, PROMPT).data(), allow_nan=False) for _ in range(2))
    assert once == twice
    assert re.match(r"Attention (agrees well|agrees in part|hardly agrees|does not agree) with the measured",
                    json.loads(once)["verdict"])  # fmt: skip


def test_the_text_has_every_token_and_the_verdict(model: Model) -> None:
    found = explain(model, PROMPT, most=3)
    text = str(found)
    assert text.count("head  ") >= 3 and text.endswith(found.verdict)
    for token, effect in zip(found.tokens, found.effects.values, strict=True):
        assert re.search(re.escape(repr(token)) + rf"\s+{re.escape(f'{effect:+.3f}')}", text)


def test_what_there_is_not_is_refused(model: Model) -> None:
    with pytest.raises(RequestError, match="999999 is not one of this model's"):
        explain(model, PROMPT, target=999_999)
    with pytest.raises(RequestError, match="makes no token"):
        explain(model, PROMPT, target="")
    with pytest.raises(RequestError, match="has no tokenizer"):
        explain(tiny(tokenizer=False), PROMPT)


def test_the_page_needs_nothing_but_itself(model: Model) -> None:
    found = explain(model, "a</script>b")
    text = page(found)
    assert text.count("<script") == 2 and text.count("</script>") == 2
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert "".join(data["tokens"]) == "a</script>b"
    assert data["rows"]["measured effect"]["values"] == pytest.approx(found.effects.values.tolist())
    assert "attention, layer 1 head 3" in data["rows"] and "https" not in text


def test_the_command(tmp_path: Path) -> None:
    save_llama(tmp_path)
    asked = ["explain", str(tmp_path), PROMPT, "--target", "a"]
    done = CliRunner().invoke(app, [*asked, "--json", "--html", str(tmp_path / "why.html")])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["target"] == "a" and len(said["effects"]["values"]) == len(said["tokens"])
    assert (tmp_path / "why.html").read_text().startswith("<!doctype html>")
    assert "Heads that matter:" in CliRunner().invoke(app, asked).output
    assert qkv.explain is explain


def test_one_token_is_too_few_to_compare(model: Model) -> None:
    found = explain(model, "a")
    assert found.verdict.startswith("There are too few tokens")
    data = json.loads(json.dumps(found.data(), allow_nan=False))
    assert data["agrees"]["attention"] is None and len(data["effects"]["values"]) == 1
    assert found.verdict in page(found)


def test_heads_that_matter_say_what_goes_directly_and_what_is_made_up_for(model: Model) -> None:
    found = explain(model, PROMPT, target="a", most=3)
    reading = Reading(model, PROMPT)
    metric = LogProbability(byte_tokenizer().encode("a")[0], len(found.tokens) - 1)
    direct, repair = direct_effects(reading, metric), self_repair(reading, metric)
    for head in found.best:
        at = {"layer": head.layer, "head": head.head}
        assert head.direct == pytest.approx(float(direct.at(**at).values), abs=1e-6)
        assert head.repair == pytest.approx(float(repair.at(**at).values), abs=1e-6)
        assert head.effect == pytest.approx(float(found.heads.at(**at).values))
    assert max(abs(head.repair or 0) for head in found.best) > 1e-3
