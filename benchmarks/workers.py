"""The harness's side of the protocol: an engine in a process, asked by lines of JSON."""

from __future__ import annotations

import json
import os
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import environments

PEERS = Path(__file__).resolve().parent / "peers"
OURS = "qkv"
PATIENCE = 20  # seconds for a process to end by itself
LONGEST = 1800  # seconds for an answer: a conversion of the larger model takes minutes


class WorkerFailed(Exception):
    """An engine did not do what it was asked to; the sentence is its own."""


def commands(extras: Sequence[str] = ()) -> dict[str, list[str]]:
    """How to start each engine that is here: ours, the peers that are set up, and NAME=COMMAND of extras."""
    found = {OURS: [sys.executable, str(PEERS / "qkv_worker.py")]}
    for peer in environments.ENGINES:
        if environments.ready(peer):
            found[peer] = [str(environments.python(peer)), str(PEERS / f"{peer}_worker.py")]
    for extra in extras:
        name, _, command = extra.partition("=")
        found[name] = shlex.split(command)
    return found


class Worker:
    """A process that speaks the protocol, `started` at that time of the clock; a context ends it."""

    def __init__(self, command: Sequence[str], log: Path, threads: int, longest: float = LONGEST):
        self.longest = longest
        # libraries that read none of our settings still obey these
        limits = {f"{library}_NUM_THREADS": str(threads) for library in ("OMP", "MKL", "OPENBLAS")}
        self.started = time.perf_counter()
        with log.open("a") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **limits, "TOKENIZERS_PARALLELISM": "false"},
            )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, **message: Any) -> dict[str, Any]:
        """The answer. Raises WorkerFailed with the engine's sentence, or of a process that ended or hangs."""
        line = b""
        if self._say(message) and self.process.stdout is not None:
            if not select.select([self.process.stdout], [], [], self.longest)[0]:
                self.process.kill()
                raise WorkerFailed(f"there was no answer in {self.longest:,.0f} s")
            line = self.process.stdout.readline()
        if not line:
            raise WorkerFailed(f"the process ended with status {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(answer["error"])
        return answer

    def close(self) -> None:
        self._say({"do": "quit"})
        try:
            self.process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()

    def _say(self, message: Mapping[str, Any]) -> bool:
        """Whether the process was there to hear it."""
        stdin = self.process.stdin
        if stdin is None or stdin.closed:
            return False
        try:
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            return False
        return True
