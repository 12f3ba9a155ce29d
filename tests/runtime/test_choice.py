"""Which runtime generates: what was asked for, then the environment, then the best there is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from qkv.errors import QkvError, RequestError, UnsupportedError
from qkv.runtime import choice
from qkv.runtime.choice import choose
from tests.matrix.variants import VARIANTS

SPEC, UNEXPRESSED = VARIANTS["grouped"], VARIANTS["shaw"]
INSTALL = 'pip install "qkv[torch]"'


@pytest.fixture(autouse=True)
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with everything, whatever this one has."""
    monkeypatch.delenv("QKV_RUNTIME", raising=False)
    monkeypatch.setattr(choice, "missing", lambda: None)
    monkeypatch.setattr(choice, "has_torch", lambda: True)


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    if "native" in names:
        monkeypatch.setattr(choice, "missing", lambda: "it was not built")
    if "torch" in names:
        monkeypatch.setattr(choice, "has_torch", lambda: False)


@pytest.mark.parametrize(
    ("lacking", "runtime", "reason"),
    [
        ((), "native", "it is the fastest"),
        (("torch",), "native", "it is the fastest"),
        (("native",), "torch", "it was not built"),
        (("native", "torch"), "numpy", "it was not built, and torch is not installed"),
    ],
)
def test_the_best_there_is(
    monkeypatch: pytest.MonkeyPatch, lacking: tuple[str, ...], runtime: str, reason: str
) -> None:
    without(monkeypatch, *lacking)
    found = choose(None, SPEC)
    assert (found.runtime, found.reason) == (runtime, reason)
    assert (found.lowered is None) == (runtime == "torch")


def test_what_no_program_expresses_runs_on_torch_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = choose(None, UNEXPRESSED)
    reason = "layers.0.attention: Shaw positions cannot be lowered to a program; it runs on torch"
    assert found.runtime == "torch" and found.reason.endswith(reason)
    without(monkeypatch, "torch")
    with pytest.raises(UnsupportedError) as problem:
        choose(None, UNEXPRESSED)
    assert str(problem.value).endswith(f"{reason}; and torch is not installed: {INSTALL}.")


def test_a_model_that_generates_nothing_is_called_and_so_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = replace(SPEC, head=None)
    assert (choose(None, bare).runtime, choose(None, bare).reason) == (
        "torch",
        "the model generates no text",
    )
    without(monkeypatch, "torch")
    assert choose(None, bare).runtime == "numpy"  # what its files say can still be asked


@pytest.mark.parametrize("given", [{"dtype": "bfloat16"}, {"device": "cuda:0"}])
def test_a_type_or_a_device_is_torchs(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    monkeypatch.setenv("QKV_RUNTIME", "numpy")  # an argument is nearer than the environment
    assert choose(None, SPEC, **given).runtime == choose("torch", SPEC, **given).runtime == "torch"
    what = "dtype bfloat16" if "dtype" in given else "device 'cuda:0'"
    for name in ("native", "numpy"):
        with pytest.raises(RequestError) as problem:
            choose(name, SPEC, **given)
        assert str(problem.value) == f"The {name} runtime has no {what}: leave it out, or choose torch."


@pytest.mark.parametrize("name", ["native", "torch", "numpy"])
def test_a_name_decides(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert (choose(name, SPEC).runtime, choose(name, SPEC).reason) == (name, "runtime names it")
    monkeypatch.setenv("QKV_RUNTIME", name)
    assert (choose(None, SPEC).runtime, choose(None, SPEC).reason) == (name, "QKV_RUNTIME names it")
    assert choose("torch", SPEC).runtime == "torch"


REFUSED: list[tuple[str, tuple[str, ...], Any, str]] = [
    ("fast", (), SPEC, "runtime is 'fast'; it must be native, torch or numpy."),
    ("native", ("native",), SPEC, "The native runtime cannot be had: it was not built."),
    ("torch", ("torch",), SPEC,
     f"The torch runtime (runtime names it) needs torch, which is not installed: {INSTALL}."),
    ("numpy", (), UNEXPRESSED,
     "decoder.layers.0.attention: Shaw positions cannot be lowered to a program; it runs on torch."),
]  # fmt: skip


@pytest.mark.parametrize(("name", "lacking", "spec", "sentence"), REFUSED)
def test_a_name_that_cannot_be_had_says_why(
    monkeypatch: pytest.MonkeyPatch, name: str, lacking: tuple[str, ...], spec: Any, sentence: str
) -> None:
    without(monkeypatch, *lacking)
    with pytest.raises(QkvError) as problem:
        choose(name, spec)
    assert str(problem.value) == sentence
    monkeypatch.setenv("QKV_RUNTIME", name)
    with pytest.raises(QkvError) as problem:
        choose(None, spec)
    assert str(problem.value) == sentence.replace("runtime names", "QKV_RUNTIME names").replace(
        "runtime is", "QKV_RUNTIME is"
    )


def test_what_the_native_runtime_refuses_the_next_best_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = UnsupportedError("The native runtime has no heads of more than 512 dimensions.")
    free, asked = choose(None, SPEC), choose("native", SPEC)
    found = choice.otherwise(free, problem)
    assert found.runtime == "torch" and found.reason == str(problem).rstrip(".")
    with pytest.raises(UnsupportedError, match="more than 512 dimensions"):
        choice.otherwise(asked, problem)
    without(monkeypatch, "torch")
    assert choice.otherwise(free, problem).runtime == "numpy"


def test_numpys_threads_are_not_set_here() -> None:
    with pytest.raises(RequestError, match="takes its threads from OMP_NUM_THREADS: leave threads out"):
        choice.machine(choose("numpy", SPEC), {}, threads=2)
