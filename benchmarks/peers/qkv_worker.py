"""qkv: its runner, a step of many rows at a time, on the fastest runtime there is here."""

from __future__ import annotations

import time
from collections.abc import Sequence

from protocol import Request, Timing, serve

import qkv
from qkv.engine.runner import runner


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
        streams, length = len(prompts), len(prompts[0])
        rows = runner(self.loaded, streams, streams, (length + new - 1, 0), lambda: None)
        try:
            start = time.perf_counter()
            newest = rows.read(prompts).argmax(-1)
            read = time.perf_counter()
            tokens = [newest]
            for _ in range(new - 1):
                newest = rows.step(list(enumerate(newest.tolist()))).argmax(-1)
                tokens.append(newest)
            decode = time.perf_counter() - read
        finally:
            rows.close()
        return Timing(read - start, decode, [[int(step[row]) for step in tokens] for row in range(streams)])


if __name__ == "__main__":
    serve(Qkv())
