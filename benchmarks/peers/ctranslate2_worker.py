"""CTranslate2: its generator over prompts of tokens, timed token by token through its callback."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import ctranslate2
from protocol import Refused, Request, Timing, serve

TYPES = {"Q8_0": "int8", "F32": "float32"}  # its bf16 and 4-bit weights are for other devices


class CTranslate2:
    name = f"CTranslate2 {ctranslate2.__version__}"

    def prepare(self, request: Request) -> None:
        """Converts the folder, once, in its own 16 bits: the generator makes its types of these."""
        self._type(request)
        folder = _converted(request)
        if not (folder / "model.bin").is_file():
            from ctranslate2.converters import TransformersConverter

            TransformersConverter(str(request.needed_folder())).convert(
                str(folder), quantization="bfloat16", force=True
            )

    def load(self, request: Request) -> str:
        folder, wanted = _converted(request), self._type(request)
        self.generator = ctranslate2.Generator(
            str(folder), device="cpu", compute_type=wanted, intra_threads=request.threads, inter_threads=1
        )
        self.words = json.loads((folder / "vocabulary.json").read_text())
        return self.generator.compute_type

    def run(self, prompts: Sequence[Sequence[int]], new: int) -> Timing:
        first: list[float] = []

        def seen(step: ctranslate2.GenerationStepResult) -> bool:
            if not first:
                first.append(time.perf_counter())
            return False

        start = time.perf_counter()
        results = self.generator.generate_batch(
            [[self.words[id] for id in prompt] for prompt in prompts],
            max_length=new,
            min_length=new,
            sampling_topk=1,
            end_token=[],
            include_prompt_in_result=False,
            callback=seen,
        )
        end = time.perf_counter()
        return Timing(first[0] - start, end - first[0], [result.sequences_ids[0] for result in results])

    def _type(self, request: Request) -> str:
        if request.type not in TYPES:
            raise Refused(f"CTranslate2 has no weights of {request.type} for a CPU.")
        return TYPES[request.type]


def _converted(request: Request):
    return request.needed_folder().with_name(f"{request.needed_folder().name}.ctranslate2")


if __name__ == "__main__":
    serve(CTranslate2())
