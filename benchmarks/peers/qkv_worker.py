"""qkv: its engine, as `generate` uses it, on the fastest runtime there is here."""

from __future__ import annotations

from collections.abc import Sequence

from protocol import Request, Timing, serve

import qkv
from qkv.engine.timing import timed


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
        return Timing(*timed(self.loaded, prompts, new))


if __name__ == "__main__":
    serve(Qkv())
