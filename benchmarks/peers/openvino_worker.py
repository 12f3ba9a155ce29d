"""OpenVINO GenAI: its pipeline of paged attention and batches, which also answers single requests."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from protocol import Refused, Request, Timing, serve

GROUPS = ["--group-size", "32", "--ratio", "1.0"]  # as GGUF's blocks; the embedding has 8 bits
EXPORTS = {
    "Q8_0": ("int8", ["--weight-format", "int8"]),
    "Q4_0": ("int4 symmetric", ["--weight-format", "int4", "--sym", *GROUPS]),
    "Q4_1": ("int4 with zero points", ["--weight-format", "int4", *GROUPS]),
    "BF16": ("16 bits", ["--weight-format", "fp16"]),  # computed in bf16 where the processor can
}


class OpenVINO:
    name = f"OpenVINO GenAI {version('openvino-genai')}"

    def prepare(self, request: Request) -> None:
        """Exports the folder, once, with OpenVINO's own tool: each format has a folder."""
        folder, options = self._export(request)
        if not (folder / "openvino_tokenizer.xml").is_file():
            tool = Path(sys.executable).with_name("optimum-cli")
            task = ["--task", "text-generation-with-past"]
            command = [tool, "export", "openvino", "-m", request.needed_folder(), *task, *options, folder]
            if subprocess.run([str(each) for each in command], stdout=sys.stderr).returncode:
                raise Refused("its own export of this model failed; its log says why")

    def load(self, request: Request) -> str:
        folder, _ = self._export(request)
        scheduler = openvino_genai.SchedulerConfig()
        # off: a prompt that was read once would cost nothing the next time
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = 4096
        properties = {"INFERENCE_NUM_THREADS": request.threads}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)
        return EXPORTS[request.type][0]

    def run(self, prompts: Sequence[Sequence[int]], new: int) -> Timing:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        config.do_sample, config.ignore_eos = False, True
        inputs = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        start = time.perf_counter()
        handles = [self.pipeline.add_request(stream, ids, config) for stream, ids in enumerate(inputs)]
        tokens: list[list[int]] = [[] for _ in prompts]
        while not all(tokens):  # long prompts take several steps
            self._step(handles, tokens)
        read, early = time.perf_counter(), sum(len(made) - 1 for made in tokens)
        while self.pipeline.has_non_finished_requests():
            self._step(handles, tokens)
        return Timing(read - start, time.perf_counter() - read, tokens, early)

    def _step(self, handles: Sequence, tokens: list[list[int]]) -> None:
        self.pipeline.step()
        for handle, made in zip(handles, tokens, strict=True):
            if handle.can_read():
                for output in handle.read().values():
                    made.extend(output.generated_ids)

    def _export(self, request: Request) -> tuple[Path, list[str]]:
        if request.type not in EXPORTS:
            raise Refused(f"OpenVINO has no format with the bits of {request.type}.")
        name, options = EXPORTS[request.type]
        place = request.needed_folder()
        return place.with_name(f"{place.name}.openvino-{name.replace(' ', '-')}"), options


if __name__ == "__main__":
    serve(OpenVINO())
