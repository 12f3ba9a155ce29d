"""Whether the C++ runtime is here, and which of its instruction sets runs; numpy is not imported to tell."""

from __future__ import annotations

import os
from importlib import import_module

NAME = "qkv.runtime._native"


def missing() -> str | None:
    """None where the C++ runtime can be imported, else why not, in half a sentence."""
    try:
        import_module(NAME)
    except ModuleNotFoundError as problem:
        if problem.name != NAME:
            return f"it needs {problem.name}, which is not installed"
        return "it was not built when qkv was installed, for which a C++20 compiler is needed"
    except ImportError as problem:  # built for another system, or against a library that has gone
        return f"it cannot be loaded: {problem}".rstrip(".")
    return None


def status() -> str:
    """For people: "native avx512", or "no native runtime: " and why there is none."""
    reason = missing()
    if reason is not None:
        return f"no native runtime: {reason}"
    sets = import_module(NAME).instruction_sets()  # the best first
    chosen = os.environ.get("QKV_ISA") or sets[0]
    if chosen not in sets:
        return f"no native runtime: QKV_ISA names {chosen!r}, and here are {', '.join(sets)}"
    return f"native {chosen}"
