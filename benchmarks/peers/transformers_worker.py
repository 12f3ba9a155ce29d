"""transformers: forward passes with its cache and PyTorch's attention, without the cost of `generate`."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import transformers
from protocol import Refused, Request, Timing, serve

TYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
CHUNK = 2048  # prompt tokens a pass, of all streams together: what longer ones need outgrows the caches


class Transformers:
    name = f"transformers {transformers.__version__}, torch {torch.__version__}"

    def prepare(self, request: Request) -> None:
        """Reads the folder as it is."""
        if request.type not in TYPES:
            raise Refused(f"transformers has no weights of {request.type} for a CPU.")

    def load(self, request: Request) -> str:
        torch.set_num_threads(request.threads)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            request.needed_folder(), dtype=TYPES[request.type], attn_implementation="sdpa"
        ).eval()
        return request.type.lower()

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]], new: int) -> Timing:
        ids = torch.tensor(prompts)
        cache = transformers.DynamicCache(config=self.model.config)
        start = time.perf_counter()
        for piece in ids.split(max(1, CHUNK // len(prompts)), dim=1):
            newest = self._step(piece, cache)
        tokens = [newest]
        read = time.perf_counter()
        for _ in range(new - 1):
            tokens.append(self._step(tokens[-1], cache))
        return Timing(read - start, time.perf_counter() - read, torch.cat(tokens, 1).tolist())

    def _step(self, ids: torch.Tensor, cache: transformers.DynamicCache) -> torch.Tensor:
        logits = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)


if __name__ == "__main__":
    serve(Transformers())
