"""`qkv verify`: its sums against torch's, small models of every kind, and that what is broken is seen."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from torch.nn.functional import cross_entropy, kl_div

from qkv import cli
from qkv.conversion import convert
from qkv.errors import QkvError, RequestError, UnsupportedError
from qkv.runtime.interpreter import Floats, Rows
from qkv.runtime.native import Native
from qkv.verification import Row, Verification, passes, theirs, verifier, verify
from qkv.verification.comparison import Tally, same
from qkv.verification.text import OWN, Text
from tests.engine.tiny import byte_tokenizer, save_llama
from tests.families.parity import Pair
from tests.runtime.native_models import needs_native
from tests.test_imports import without_torch

TOKENS = 150  # more than one piece


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verified")
    save_llama(path, hidden_size=64, intermediate_size=256, initializer_range=0.2)
    return path


@pytest.fixture(scope="module")
def found(folder: Path) -> Verification:
    return verify(folder, tokens=TOKENS)


def named(found: Verification, what: str) -> Row:
    (row,) = (row for row in found.rows if row.what.startswith(what))
    return row


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["verify", *map(str, arguments)])


# the figures


def test_the_sums_over_pieces_are_torchs_over_the_whole() -> None:
    generator = torch.Generator().manual_seed(3)
    theirs = 4 * torch.randn(50, 37, generator=generator)
    ours = theirs + torch.randn(50, 37, generator=generator)
    targets = torch.randint(0, 37, (50,), generator=generator)
    targets[-1] = -1
    tally = Tally(Text("", [0] * 50, None, targets.numpy(), True, True), theirs.numpy())
    for piece in ours.split(13):
        tally.add(piece.numpy())
    row = tally.row("row", 1.0)
    assert row.difference == pytest.approx(float((ours - theirs).abs().max() / theirs.abs().max()))
    wanted = kl_div(ours.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="batchmean")
    assert row.divergence == pytest.approx(float(wanted), rel=1e-5)
    assert row.agreement == float((ours.argmax(-1) == theirs.argmax(-1)).double().mean()) != 1
    assert row.perplexity == pytest.approx(float(cross_entropy(ours, targets, ignore_index=-1).exp()))


def test_two_coins() -> None:
    """(1/2, 1/2) against (1/4, 3/4): ln 2 - ln 3 / 2 nats."""
    tally = Tally(Text("", [0], None, None, True, True), np.zeros((1, 2), np.float32))
    tally.add(np.log([[0.25, 0.75]]).astype(np.float32))
    assert tally.row("", 1.0).divergence == pytest.approx(np.log(2) - np.log(3) / 2, rel=1e-6)
    assert tally.row("", 1.0).perplexity is None


def test_answers_of_another_shape_are_refused() -> None:
    tally = Tally(Text("", [0], None, None, True, True), np.zeros((1, 2), np.float32))
    with pytest.raises(
        UnsupportedError, match=r"its answers are \(1, 3\), and those of the reference \(1, 2\)"
    ):
        tally.add(np.zeros((1, 3), np.float32))
    with pytest.raises(UnsupportedError, match="it gives 0 answers, and the reference 1"):
        tally.row("", 1.0)


def test_the_same_bits() -> None:
    one = np.array([[1.0, 0.0, np.nan]], np.float32)
    assert same(one, one.copy()) and not same(one, one * np.array([1, -1, 1], np.float32))
    assert not same(one, np.nextafter(one, np.float32(2)))


# small models


@needs_native
def test_a_small_llama(found: Verification) -> None:
    assert found.passed and found.tokens == TOKENS and found.problems == found.absent == ()
    assert [row.what for row in found.rows] == [
        "reference: torch, fp32",
        "native, weights as F32, cache f32",
        "native, as stored (F32), cache bf16",
        "native, as stored (F32), cache int8",
        "native, Q8_0, cache bf16",
        "native, Q6_K (Q8_0, Q6_K), cache bf16",
        "native, Q4_K (Q5_0, Q4_K), cache bf16",
        "native, Q4_0, cache bf16",
        f"transformers {transformers.__version__}, fp32",
    ]
    for row in (found.rows[1], found.rows[-1]):
        assert row.difference is not None and 0 < row.difference <= 1e-5
        assert row.divergence is not None and row.divergence < 1e-10 and row.agreement == 1
    off = [row.divergence or 0 for row in found.rows]
    assert off[1] < off[2] < off[3] < 1e-3  # the cache in 32, 16 and 8 bits
    assert off[2] < off[4] < off[5] < off[6] < off[7]  # the weights in fewer and fewer
    assert all(row.threads and row.pieces for row in found.rows[1:-1])


def test_perplexity_is_transformers_own(folder: Path, found: Verification) -> None:
    ids = byte_tokenizer().encode(OWN.read_text())[:TOKENS]
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    wanted = float(cross_entropy(logits, torch.tensor(ids[1:])).exp())
    for row in (found.rows[0], found.rows[-1]):
        assert row.perplexity == pytest.approx(wanted, rel=1e-5)


def test_our_own_text_is_long_enough() -> None:
    assert 600 <= len(OWN.read_text().split()) <= 900


def test_a_file_is_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("hello ABC DEF")
    found = verify(folder, tmp_path / "text.txt")
    assert found.tokens == len(byte_tokenizer().encode("hello ABC DEF")) and found.text == "text.txt"
    assert verify(folder, "hello ABC DEF").rows[0].perplexity == found.rows[0].perplexity


pair = cache(Pair)  # its folder goes with it

# what a program expresses, and what it does not
KINDS = {
    "bert-masked": (True, True, False),
    "bert-bare": (True, False, False),
    "t5": (True, True, False),
    "gpt2-bare": (True, False, False),
    "deberta": (False, True, False),
    "bert-sequence": (False, False, False),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_models(name: str) -> None:
    lowered, probable, told = KINDS[name]
    found = verify(pair(name).folder, tokens=30, formats="Q8_0")
    assert found.passed, found.verdict
    other = named(found, "transformers")
    assert other.difference is not None and other.difference <= 1e-5
    assert (other.divergence is not None) == (other.agreement is not None) == probable
    assert (other.perplexity is not None) == told  # there are no tokenizers
    if not lowered:
        assert [row.what for row in found.rows] == ["reference: torch, fp32", other.what]
        assert found.absent[0].startswith("The native runtime is not compared: ")
        assert "cannot be lowered to a program" in found.absent[0] and found.threads is None
        assert found.verdict == "The reference agrees with transformers; the native runtime was not compared."


@needs_native
def test_an_encoder_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its program too; where logits are too many for memory, it is read again for each piece of them."""
    whole = verify(pair("bert-masked").folder, tokens=30, formats="Q8_0")
    assert "in pieces of 100: not compared, as every place reads all others" in str(whole)
    assert all(row.pieces is None and row.threads for row in whole.rows[1:-1])
    monkeypatch.setattr(passes, "BUDGET", 4 * 61 * 7)
    pieces = verify(pair("bert-masked").folder, tokens=30, formats="Q8_0")
    for a, b in zip(whole.rows[1:], pieces.rows[1:], strict=True):
        assert (a.what, a.difference, a.agreement) == (b.what, b.difference, b.agreement)


def test_transformers_too_makes_large_logits_in_parts(
    folder: Path, found: Verification, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(theirs, "BUDGET", 1 << 14)
    calls, forward = [], transformers.LlamaForCausalLM.forward

    def counted(*given: Any, logits_to_keep: Any = 0, **more: Any) -> Any:
        calls.append(logits_to_keep)
        return forward(*given, logits_to_keep=logits_to_keep, **more)

    counted.__signature__ = theirs.signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", counted)
    parts = named(verify(folder, tokens=TOKENS, formats="Q8_0"), "transformers")
    assert len(calls) > 5 and torch.cat(calls).tolist() == list(range(TOKENS))
    assert parts.difference is not None and parts.difference <= 1e-5
    assert parts.perplexity == pytest.approx(named(found, "transformers").perplexity)


@needs_native
def test_a_gguf_that_is_quantised(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    convert(folder, path, "Q8_0")
    found = verify(path, tokens=TOKENS)
    whats = [row.what for row in found.rows]
    assert whats[2:4] == [f"native, as stored (Q8_0), cache {kind}" for kind in ("bf16", "int8")]
    assert len(whats) == 5  # no other formats, unless they are asked for
    assert found.passed and found.absent == ()
    other = named(found, "transformers")
    assert other.difference is not None and other.difference <= 1e-5
    assert len(verify(path, tokens=20, formats=["q4_0", "Q4_0", "F16"]).rows) == 7


def test_without_a_tokenizer_the_ids_are_random_and_always_the_same(tmp_path: Path) -> None:
    save_llama(tmp_path, pad_token_id=5)
    (tmp_path / "tokenizer.json").unlink()
    found, again = verify(tmp_path, tokens=20), verify(tmp_path, tokens=20)
    assert found.text == "fixed random ids from 266, as there is no tokenizer" and found.passed
    assert [row.perplexity for row in found.rows] == [None] * len(found.rows)
    assert [row.difference for row in found.rows] == [row.difference for row in again.rows]
    with pytest.raises(RequestError, match="has no tokenizer to read a text with"):
        verify(tmp_path, "hello")


# what is broken is seen


@needs_native
def test_the_weights_of_another_model_are_caught(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_llama(tmp_path, hidden_size=64, intermediate_size=256, initializer_range=0.25)
    others = verifier.Parameters(verifier._opened(tmp_path).files, verifier._opened(tmp_path).places)
    monkeypatch.setattr(verifier, "Native", lambda lowered, weights, *rest: Native(lowered, others, *rest))
    done = run(folder, "--tokens", 60, "--format", "Q8_0")
    assert (
        done.exit_code == 1
        and "\nNot verified: native, weights as F32, cache f32: the difference is" in done.output
    )
    found = json.loads(run(folder, "--tokens", 60, "--json").output)
    assert not found["passed"]
    parts = ("F32, cache f32: the difference", "bf16: the divergence", "bf16: the share of other top tokens")
    for part in parts:
        assert any(part in problem for problem in found["problems"])
    assert not any("transformers" in problem for problem in found["problems"])


def flipped(answers: Floats) -> Floats:
    """The lowest bit of one number in each row."""
    answers = np.ascontiguousarray(answers)
    answers.view(np.uint32)[:, 0] ^= 1
    return answers


@needs_native
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            lambda machine, rows: machine.threads == 1 and rows.positions[0] == 0,
            "1 and 2 threads give different bits",
        ),
        (lambda machine, rows: len(rows.tokens) == 100, "reading at once and in pieces gives different bits"),
    ],
)
def test_one_bit_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch, broken: Any, said: str) -> None:
    step = Native.step

    def wrong(machine: Native, rows: Rows) -> Floats:
        answers = step(machine, rows)
        return flipped(answers) if broken(machine, rows) else answers

    monkeypatch.setattr(Native, "step", wrong)
    found = verify(folder, tokens=TOKENS, formats="Q8_0", threads=2)
    assert not found.passed and len(found.problems) == 4  # of each way to run it, and nothing else
    assert all(said in problem for problem in found.problems) and ": NO\n" in str(found)


@needs_native
def test_what_is_no_number_exceeds_every_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Native.step
    monkeypatch.setattr(Native, "step", lambda machine, rows: step(machine, rows) * np.float32(np.nan))
    done = run(folder, "--tokens", 60, "--json")
    found = json.loads(done.output)
    assert done.exit_code == 1 and found["rows"][1]["difference"] is None
    assert "native, weights as F32, cache f32: the difference is nan, and may be 0.0001." in found["problems"]


def test_transformers_may_be_the_one_that_differs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = verifier.network_of

    def other(loaded: Any) -> Any:
        network = made(loaded)
        with torch.no_grad():
            network.lm_head.weight.mul_(1.5)
        return network

    monkeypatch.setattr(verifier, "network_of", other)
    found = verify(folder, tokens=60, formats="Q8_0")
    assert len(found.problems) == 1 and "one of the two reads the files wrongly" in found.problems[0]


# what cannot be compared is said


def test_what_is_not_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    found = verify(folder, tokens=20, formats="Q8_0")
    said = "transformers is not compared: transformers is not installed (pip install transformers)."
    assert found.absent == (said,) and said in str(found)
    monkeypatch.setattr(verifier, "missing", lambda: "it was not built")
    found = verify(folder, tokens=20)
    assert found.absent[0] == "The native runtime is not compared: it was not built." and not found.passed
    assert found.verdict == "Not verified: there is nothing here to compare the reference with."
    assert run(folder, "--tokens", 20).exit_code == 1


def test_what_transformers_refuses_is_its_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(loaded: Any) -> Any:
        raise ValueError("No such model.\nA long story")

    monkeypatch.setattr(verifier, "network_of", refuse)
    found = verify(folder, tokens=20, formats="Q8_0")
    assert found.absent == ("transformers is not compared: No such model.",)


@needs_native
def test_without_torch_the_reference_is_numpy(folder: Path, found: Verification) -> None:
    data = without_torch(
        "from qkv.verification import verify",
        f'print(json.dumps(verify({str(folder)!r}, tokens={TOKENS}, formats="Q8_0").data()))',
    )
    assert [row["what"] for row in data["rows"]][:2] == ["reference: numpy, fp32", found.rows[1].what]
    assert data["rows"][1]["difference"] <= 1e-5 and data["passed"]
    assert data["rows"][0]["perplexity"] == pytest.approx(found.rows[0].perplexity, rel=1e-5)
    assert data["absent"] == ["transformers is not compared: torch is not installed (pip install torch)."]


def test_images_are_refused(tmp_path: Path) -> None:
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=8,
        patch_size=4,
    )
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="reads images or audio, and only models of text can be"):
        verify(tmp_path)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tokens": 1}, "tokens is 1; it must be a whole number of at least 2"),
    ({"threads": 0}, "threads is 0; it must be"),
    ({"formats": "Q2_K"}, "format 'Q2_K' is not known (F32, F16, BF16, Q8_0"),
    ({"text": ""}, "The text makes 0 tokens; give at least two."),
    ({"text": Path("absent.txt")}, "absent.txt cannot be read: No such file"),
]


@pytest.mark.parametrize(("given", "said"), WRONG)
def test_wrong_requests(folder: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        verify(folder, **given)
    assert said in str(caught.value)


def test_a_file_that_is_no_text(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError, match="is not UTF-8 text"):
        verify(folder, tmp_path / "x")
    with pytest.raises(QkvError):
        verify(tmp_path / "missing")


# the command


def test_the_command_prints_the_table(folder: Path, found: Verification) -> None:
    done = run(folder, "--tokens", TOKENS, "--threads", 2)
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert lines[0] == f"{folder.name}, {TOKENS} tokens of a text on attention that comes with qkv"
    table = lines[2 : 3 + len(found.rows)]
    assert len({len(line) for line in table}) == 1  # aligned
    assert table[0].split() == ["difference", "KL,", "nats", "same", "top", "token", "perplexity", "tokens/s"]
    assert f"{found.rows[0].perplexity:,.3f}" in table[1] and table[1].split()[-5:-2] == ["-"] * 3
    assert lines[-1] == found.verdict


def test_json_is_the_same(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("hello ABC DEF " * 20)
    done = run(folder, "--text", tmp_path / "text.txt", "--tokens", 40, "--format", "q8_0", "--json")
    data = json.loads(done.output)
    wanted = verify(folder, tmp_path / "text.txt", 40, "Q8_0").data()
    assert done.exit_code == 0
    for each in (data, wanted):
        for row in each["rows"]:
            assert row.pop("tokens_per_second") > 0
    assert data == wanted and data["text"] == "text.txt" and data["passed"] is True


def test_help_shows_examples() -> None:
    done = run("--help")
    for part in ("--text", "--tokens", "--format", "--threads", "--json", "qkv verify smollm2", "status 1"):
        assert part in done.output


def test_progress_counts_every_pass(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    verify(folder, tokens=20, formats="Q8_0", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == len(seen) and [done for done, _ in seen] == [
        *range(1, len(seen) + 1)
    ]


@pytest.mark.slow
@needs_native
def test_smollm2_on_wikitext(shared_folder: Path, smollm2_file: Path) -> None:
    found = verify(smollm2_file, shared_folder / "data" / "wiki.test.raw", 2048)
    assert found.passed, found.verdict
    assert found.rows[0].perplexity == pytest.approx(15.10, abs=0.02)
    assert named(found, "native, weights as F32").perplexity == pytest.approx(
        found.rows[0].perplexity, abs=1e-3
    )
    assert named(found, "native, as stored (mostly Q4_1), cache bf16").perplexity == pytest.approx(
        15.10, abs=0.2
    )
