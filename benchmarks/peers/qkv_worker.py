"""qkv: its engine, as `generate` uses it, on the fastest runtime there is here."""

from __future__ import annotations

import time
from collections.abc import Sequence

from protocol import Request, Timing, serve

import qkv
from qkv.engine import Request as Asked
from qkv.engine.generation import scheduler, submit


class Qkv:
    name = f"qkv {qkv.__version__}"

    def prepare(self, request: Request) -> None:
        """Reads the file as it is."""

    def load(self, request: Request) -> str:
        self.loaded = qkv.load(request.gguf, threads=request.threads).loaded
        runtime = self.loaded.choice.runtime
        if runtime == "torch":
            kind = str(next(self.loaded.model.parameters()).dtype).removeprefix("torch.")
            return f"{kind}, run by torch"
        return f"{request.type}, run by {runtime}"

    def run(self, prompts: Sequence[Sequence[int]], new: int) -> Timing:
        serving = scheduler(self.loaded)
        asked = [Asked(tuple(prompt), new, ignore_eos=True) for prompt in prompts]
        start = time.perf_counter()
        tasks = [submit(serving, request, {}, shares=True) for request in asked]
        while not all(task.answered for task in tasks):
            serving.step()
        read = time.perf_counter()
        early = sum(len(task.said) - 1 for task in tasks)
        while serving.step():
            pass
        decode = time.perf_counter() - read
        found = [task.said[-1][2].tokens for task in tasks]
        return Timing(read - start, decode, found, early)


if __name__ == "__main__":
    serve(Qkv())
