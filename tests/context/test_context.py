"""How far a context carries: readers that forget are found out, extensions are what they are called."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from qkv.cli import app
from qkv.context import EXTENSIONS, Context, context, extended, measure as module
from qkv.context.reading import Reader
from qkv.context.result import Extended
from qkv.context.tasks import SPAN, Bucket, Copied, Found, Given, by_context, copying, retrieval
from qkv.errors import RequestError, UnsupportedError
from qkv.runtime.torch_machine import TorchMachine
from qkv.spec import NTK, Alibi, Attention, Model, Rotary, Yarn, pre_norm
from qkv.spec.feed_forward import Dense
from tests.engine.tiny import byte_tokenizer, save_llama, spec, tiny

TEXT = np.random.default_rng(0).integers(0, 256, 700).tolist()


def silent(what: str) -> None: ...


# --- reading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", ["torch", "native"])
def test_losses_are_cross_entropy(runtime: str) -> None:
    model = tiny(seed=1, runtime=runtime)
    machine = TorchMachine(model.network) if runtime == "torch" else model.loaded.machine
    found = Reader(machine).losses(TEXT)
    with torch.no_grad():
        logits = model.network(torch.tensor([TEXT]))[0, :-1]
    wanted = torch.nn.functional.cross_entropy(logits, torch.tensor(TEXT[1:]), reduction="none").numpy()
    assert np.abs(found - wanted).max() < 1e-4
    assert not any(machine.own[0].holders)


def test_what_is_said_is_greedy() -> None:
    model = tiny(seed=1)
    wanted = model.generate(TEXT, max_new_tokens=7, ignore_eos=True)
    assert Reader(TorchMachine(model.network)).said(TEXT, 7) == wanted.tokens  # type: ignore[union-attr]


# --- tasks --------------------------------------------------------------------------------------


class Forgetful:
    """Knows a token that stood among the last `reach`; says the key it was told, if it still sees it."""

    def __init__(self, reach: int):
        self.reach = reach

    def losses(self, tokens: Sequence[int]) -> np.ndarray:
        seen = [tokens[i] in tokens[max(0, i - self.reach) : i] for i in range(1, len(tokens))]
        return np.where(seen, 1.0, 5.0)

    def said(self, tokens: Sequence[int], count: int) -> list[int]:
        text = byte_tokenizer().decode(list(tokens[-self.reach :]))
        at = text.find("The pass key is ")
        key = text[at + 16 : at + 21] if 0 <= at < len(text) - 30 else "?????"
        answer = byte_tokenizer().encode(f" The pass key is {key}")
        return answer[len(byte_tokenizer().encode(" The pass key is")) :][:count]


def test_keys_come_back_as_far_as_a_reader_sees() -> None:
    filler = byte_tokenizer().encode("the cat sat on the mat. " * 300)
    reader = cast(Reader, Forgetful(700))
    found = retrieval(reader, byte_tokenizer(), filler, [512, 1024, 2048], (0.0, 0.5, 1.0), 2, silent)
    share = {(f.length, f.depth): f.right / f.asked for f in found}
    assert [share[512, d] for d in (0.0, 0.5, 1.0)] == [1, 1, 1]
    assert [share[1024, d] for d in (0.0, 0.5, 1.0)] == [0, 1, 1]
    assert [share[2048, d] for d in (0.0, 0.5, 1.0)] == [0, 0, 1]


def test_tokens_are_copied_as_far_as_a_reader_sees() -> None:
    found = copying(cast(Reader, Forgetful(700)), 40_000, [512, 1024], 100, silent)
    assert found[0].again == 1.0 and found[1].again > 4.8
    assert all(one.first > 4.8 for one in found)


def test_more_context_helps_as_far_as_a_reader_sees() -> None:
    """Each token stood 900 before: who reads 1,024 and more has seen all of the last 256 but 132."""
    text = np.random.default_rng(1).permutation(900).tolist() * 4
    found = by_context(cast(Reader, Forgetful(1000)), text, [512, 1024, 2048], 3, silent)
    assert [one.context for one in found] == [512, 1024, 2048]
    assert found[0].loss == 5 and found[2].loss == 1
    assert found[1].loss == pytest.approx((124 * 1 + 132 * 5) / SPAN)
    assert found[2].gain == 4 and found[2].error == 0
    alone = by_context(cast(Reader, Forgetful(1000)), text, [512, 1024], 1, silent)
    assert [one.error for one in alone] == [None, None]  # one text says nothing of others


# --- the verdict --------------------------------------------------------------------------------


def measured(losses: Sequence[float], shares: Sequence[int], again: Sequence[float]) -> Context:
    lengths = [512, 1024, 2048, 4096]
    return Context(
        "a model",
        4096,
        4096,
        tuple(Given(n, loss, 0, 0) for n, loss in zip(lengths, losses, strict=True)),
        tuple(Found(n, 0.5, right, 10) for n, right in zip(lengths, shares, strict=True)),
        tuple(Copied(n, a, 10.0) for n, a in zip(lengths, again, strict=True)),
    )


def test_the_usable_context_is_the_least_of_three() -> None:
    good = ([3, 2.9, 2.8, 2.8], [9, 9, 8, 9], [1, 1, 1, 1])
    assert measured(*good).usable == 4096
    assert measured([3, 2.9, 2.94, 3.1], *good[1:]).usable == 2048  # 0.04 above the best is noise
    assert measured(good[0], [9, 9, 3, 9], good[2]).usable == 1024
    assert measured(*good[:2], [1, 6, 1, 1]).usable == 512
    assert measured(good[0], [0, 9, 9, 9], good[2]).usable == 0


def test_extensions_come_in_the_order_of_their_losses() -> None:
    def at(kind: str, *losses: float) -> Extended:
        return Extended(kind, 2.0, (Bucket(0, 8191, 1.0),), losses)

    ways = at("none", 8.0, 8.5), at("yarn", 3.0, 4.0)
    found = replace(measured([3] * 4, [9] * 4, [1] * 4), extensions=ways)
    assert found.order() == [("yarn", 3.5), ("none", 8.25)]
    assert "Here, the best first: yarn, none." in str(found)


# --- extensions ---------------------------------------------------------------------------------


def scaling(kind: str, factor: float = 4.0, length: int = 4096) -> object:
    model = extended(spec(), kind, factor, 1024, length)
    assert model.decoder is not None
    found = {layer.sublayers[0].branches[0].mixer.position.scaling for layer in model.decoder.layers}  # type: ignore[union-attr]
    (one,) = found
    return one


def frequencies(found: object) -> tuple[np.ndarray, float]:
    return found.frequencies(100.0, 6, 4096)  # type: ignore[attr-defined, no-any-return]


def test_each_extension_is_what_it_is_called() -> None:
    plain = 100.0 ** (-np.arange(0, 6, 2) / 6)
    assert frequencies(scaling("linear"))[0] == pytest.approx(plain / 4)
    assert scaling("ntk") == NTK(4.0) and scaling("yarn") == Yarn(4.0, 1024)
    # D17 for the whole length: factor * l / L - (factor - 1)
    assert scaling("dynamic", 2.0, 4096) == NTK(2 * 4 - 1) and scaling("dynamic", 2.0, 512) == NTK(1.0)
    values, factor = frequencies(scaling("longrope"))
    assert values == pytest.approx(frequencies(NTK(4.0))[0], rel=1e-6)
    assert factor == pytest.approx((1 + np.log(4) / np.log(1024)) ** 0.5)  # D18b
    assert set(EXTENSIONS) == {"linear", "ntk", "dynamic", "yarn", "longrope"}


def test_what_cannot_be_extended_is_named() -> None:
    with pytest.raises(RequestError, match="extend is 'yarm'"):
        extended(spec(), "yarm", 2.0, 512, 1024)
    with pytest.raises(RequestError, match="at least 1"):
        extended(spec(), "yarn", 0.5, 512, 1024)
    with pytest.raises(UnsupportedError, match="slowed already, by NTK"):
        extended(extended(spec(), "ntk", 2.0, 512, 1024), "yarn", 2.0, 512, 1024)
    other = pre_norm(Attention(4, 2, 6, position=Alibi()), Dense("relu", 8))
    stack = spec().decoder
    assert stack is not None
    with pytest.raises(UnsupportedError, match="no rotary positions"):
        extended(Model(decoder=replace(stack, layers=(other,))), "yarn", 2.0, 512, 1024)
    assert isinstance(spec().decoder.layers[0].sublayers[0].branches[0].mixer.position, Rotary)  # type: ignore[union-attr]


# --- the whole ----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_llama(tmp_path, max_position_embeddings=640)
    return tmp_path


def test_the_command_measures_a_model_and_its_extensions(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "context.html"
    asked = ["context", str(folder), "--texts", "2", "--times", "1", "--extend", "all", "--json"]
    done = CliRunner().invoke(app, [*asked, "--html", str(page)])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["advertised"], said["read"]) == (640, 640)
    assert [one["context"] for one in said["given"]] == [512, 640]
    assert {one["kind"] for one in said["extensions"]} == {"none", *EXTENSIONS}
    assert all(one["buckets"][-1]["end"] == 1279 for one in said["extensions"])
    # 639 losses past the advertised 640, in stretches of 256 or more
    assert all(len(one["later"]) == 2 for one in said["extensions"])
    assert {one["kind"] for one in said["extensions"] if one["stands_in"]} == {"longrope"}
    assert "longrope" not in {name for pair in said["pairs"] for name in (pair["better"], pair["worse"])}
    # an untrained model knows nothing: it does no better than to guess
    assert all(one["loss"] > np.log(266) - 0.1 for one in said["given"])
    assert page.read_text().count("<svg") == 4


def test_a_short_text_is_refused_with_both_numbers(folder: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Nothing much.")
    with pytest.raises(RequestError, match=r"The text has \d+ tokens and 640 are needed"):
        context(folder, text=short)
    with pytest.raises(RequestError, match="cannot be read as UTF-8 text"):
        context(folder, text=tmp_path / "absent.txt")


def test_what_would_do_nothing_is_refused(folder: Path) -> None:
    with pytest.raises(RequestError, match="length is 900 and this model is made for 640"):
        context(folder, length=900)
    done = CliRunner().invoke(app, ["context", str(folder), "--weighing"])
    assert isinstance(done.exception, RequestError)
    with pytest.raises(RequestError, match="factor is 1; nothing is longer"):
        context(folder, extend=["yarn"], factor=1.0)
    assert isinstance(CliRunner().invoke(app, ["plan", str(folder), "-t", "1"]).exception, RequestError)


def test_lengths_double_up_to_the_most() -> None:
    assert module._doubling(8192) == [512, 1024, 2048, 4096, 8192]
    assert module._doubling(700) == [512, 700] and module._doubling(300) == [300]
