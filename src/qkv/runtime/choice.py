"""Which runtime generates with a model: what was asked for, else the fastest there is here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, get_args

from qkv.checkpoints import StoredTensor
from qkv.errors import RequestError, UnsupportedError
from qkv.runtime.built import missing
from qkv.runtime.lower import Lowered, lower
from qkv.runtime.machine import Interpreted, Machine
from qkv.spec import Language, Model

Runtime = Literal["native", "torch", "numpy"]
VARIABLE = "QKV_RUNTIME"  # of the environment: the runtime where nothing else asks for one
INSTALL = 'pip install "qkv[torch]"'


@dataclass(frozen=True)
class Choice:
    """A runtime and, in half a sentence, why it is this one.

    `lowered` are the programs it runs, if any. A `free` choice is one that nobody made.
    """

    runtime: Runtime
    reason: str
    lowered: Lowered | None = None
    free: bool = False


def choose(
    asked: str | None, spec: Model, device: str = "cpu", dtype: Any = None, weighs: bool = False
) -> Choice:
    """The runtime for a model.

    `asked` decides, if it is given: RequestError for another name, or beside a `dtype` or `device`
    that only torch has; UnsupportedError where it cannot be had. Then a dtype, or a device other than
    "cpu", means torch. Then QKV_RUNTIME decides. Where nothing does: native where it is built and can
    express the model, else torch where it is installed, else numpy. A cache that `weighs` its keys by
    the attention they get is torch's too.
    """
    elsewhere = f"dtype {dtype}" if dtype is not None else f"device {device!r}" if device != "cpu" else None
    if weighs:
        elsewhere = elsewhere or "keeping by attention weights"
    if asked is not None:
        if elsewhere and _known(asked, "runtime") != "torch":
            raise RequestError(f"The {asked} runtime has no {elsewhere}: leave it out, or choose torch.")
        return _named(asked, "runtime", spec)
    if elsewhere:
        return _named("torch", "runtime", spec, f"{elsewhere} is asked for")
    if os.environ.get(VARIABLE):
        return _named(os.environ[VARIABLE], VARIABLE, spec)
    return _best(spec)


def has_torch() -> bool:
    return find_spec("torch") is not None


def require_torch(what: str) -> None:
    """Raises UnsupportedError, with the way on, where torch is not installed."""
    if not has_torch():
        raise UnsupportedError(f"{what} needs torch, which is not installed: {INSTALL}.")


def machine(
    choice: Choice, weights: Mapping[str, StoredTensor], threads: int | None = None, kv: str | None = None
) -> Machine:
    """What runs the programs of a choice other than torch. `threads` None are as many as do good.

    `kv` is how keys and values are kept, of the native runtime's ways.
    """
    if choice.lowered is None:
        raise UnsupportedError(f"The {choice.runtime} runtime runs no programs.")
    if choice.runtime == "native":
        from qkv.runtime.native import Native

        return Native(choice.lowered, weights, threads, kv)
    if threads is not None:
        raise RequestError("The numpy runtime takes its threads from OMP_NUM_THREADS: leave threads out.")
    return Interpreted(choice.lowered, weights)


def _known(name: str, where: str) -> str:
    if name not in get_args(Runtime):
        raise RequestError(f"{where} is {name!r}; it must be native, torch or numpy.")
    return name


def _named(name: str, where: str, spec: Model, reason: str | None = None) -> Choice:
    """The runtime of this name, which `where` or another reason asks for."""
    reason = reason or f"{where} names it"
    if _known(name, where) == "torch":
        require_torch(f"The torch runtime ({reason})")
        return Choice("torch", reason)
    absent = missing() if name == "native" else None
    if absent:
        raise UnsupportedError(f"The native runtime cannot be had: {absent}.")
    return Choice("native" if name == "native" else "numpy", reason, lower(spec))


def _best(spec: Model) -> Choice:
    try:
        lowered = lower(spec)
    except UnsupportedError as problem:
        return _other(None, problem)
    if not generates(spec):
        return _other(lowered, "the model generates no text")
    absent = missing()
    return _other(lowered, absent) if absent else Choice("native", "it is the fastest", lowered, free=True)


def otherwise(refused: Choice, problem: UnsupportedError) -> Choice:
    """The next best where the native runtime was not asked for, and refuses the model."""
    if not refused.free:
        raise problem
    return _other(refused.lowered, problem)


def _other(lowered: Lowered | None, why: UnsupportedError | str) -> Choice:
    """Torch, else numpy, as the native runtime cannot be had."""
    reason = str(why).rstrip(".")
    if has_torch():
        return Choice("torch", reason)
    if lowered is None:
        raise UnsupportedError(f"{reason}; and torch is not installed: {INSTALL}.")
    return Choice("numpy", f"{reason}, and torch is not installed", lowered)


def generates(spec: Model) -> bool:
    return isinstance(spec.head, Language) and spec.decoder is not None
