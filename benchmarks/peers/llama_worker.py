"""llama.cpp, called through the C API that llama-cpp-python binds: no sampling, no text, no wrapper."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import llama_cpp
import numpy as np
from protocol import Request, Timing, serve

CHUNK = 512  # prompt tokens a call, llama.cpp's own default for what it computes at once


@llama_cpp.llama_log_callback
def _silent(level, text, data):
    pass


class Llama:
    name = f"llama.cpp (llama-cpp-python {llama_cpp.__version__})"

    def __init__(self):
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.context = self.size = None

    def prepare(self, request: Request) -> None:
        """Reads the file as it is."""

    def load(self, request: Request) -> str:
        self.threads = request.threads
        settings = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(request.gguf).encode(), settings)
        if not self.model:
            raise ValueError(f"{request.gguf.name} could not be loaded")
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab = llama_cpp.llama_vocab_n_tokens(vocabulary)
        return request.type

    def run(self, prompts: Sequence[Sequence[int]], new: int) -> Timing:
        streams, length = len(prompts), len(prompts[0])
        self._open(streams, length + new)
        start = time.perf_counter()
        # one stream after another: its prompts are long enough to fill a call, and it gains nothing together
        tokens = [[self._read(stream, prompt)] for stream, prompt in enumerate(prompts)]
        read = time.perf_counter()
        everyone = range(streams)
        for position in range(length, length + new - 1):
            self._call([made[-1] for made in tokens], [position] * streams, everyone, [1] * streams)
            for stream, made in enumerate(tokens):
                made.append(self._likeliest(stream))
        return Timing(read - start, time.perf_counter() - read, tokens)

    def _open(self, streams: int, length: int) -> None:
        """An empty context for so many streams: the one there is, where it has this size."""
        if self.size == (streams, length):
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
            return
        if self.context:
            llama_cpp.llama_free(self.context)
            llama_cpp.llama_batch_free(self.batch)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = streams * length
        settings.n_batch = settings.n_ubatch = CHUNK
        settings.n_threads = settings.n_threads_batch = self.threads
        settings.n_seq_max = streams
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        if not self.context:
            raise ValueError(f"no context for {streams} streams of {length} tokens")
        self.batch = llama_cpp.llama_batch_init(max(CHUNK, streams), 0, 1)
        self.size = streams, length

    def _read(self, stream: int, prompt: Sequence[int]) -> int:
        for start in range(0, len(prompt), CHUNK):
            piece = prompt[start : start + CHUNK]
            last = start + len(piece) == len(prompt)
            wanted = [0] * (len(piece) - 1) + [int(last)]
            self._call(piece, range(start, start + len(piece)), [stream] * len(piece), wanted)
        return self._likeliest(len(piece) - 1)

    def _call(self, tokens: Sequence[int], positions, streams, wanted) -> None:
        batch = self.batch
        batch.n_tokens = len(tokens)
        for row, each in enumerate(zip(tokens, positions, streams, wanted, strict=True)):
            batch.token[row], batch.pos[row], batch.seq_id[row][0], batch.logits[row] = each
            batch.n_seq_id[row] = 1
        status = llama_cpp.llama_decode(self.context, batch)
        if status:
            raise ValueError(f"llama_decode answered {status}")

    def _likeliest(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, (self.vocab,)).argmax())


if __name__ == "__main__":
    serve(Llama())
