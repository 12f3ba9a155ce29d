"""What weights take: every tensor in its format, by whole blocks; and what one device holds of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from qkv.checkpoints.formats import FORMATS
from qkv.errors import RequestError
from qkv.planning.sizes import Part
from qkv.spec import Model
from qkv.spec.node import Tensor

# what people and configurations call formats
NAMES = {
    "float32": "F32", "fp32": "F32", "bfloat16": "BF16", "float16": "F16", "fp16": "F16", "half": "F16",
    "int8": "Q8_0", "int4": "Q4_0", "fp8": "F8_E4M3",
}  # fmt: skip
SHORTER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "Q2_K": "Q4_0", "Q3_K": "Q4_0"}


@dataclass(frozen=True)
class Stored:
    """The format of matrices, that of matrices of experts, and that of everything else."""

    matrices: str
    experts: str
    others: str

    @property
    def name(self) -> str:
        return self.matrices.lower() if self.matrices == self.experts else f"{self.experts.lower()} experts"

    def of(self, tensor: Tensor) -> str:
        if len(tensor.shape) < 2:
            return self.others
        wanted = self.experts if tensor.used < tensor.size else self.matrices
        while tensor.shape[-1] % FORMATS[wanted].block:
            wanted = SHORTER.get(wanted, "F16")  # blocks do not fit its rows
        return wanted


def stored(asked: str) -> Stored:
    """A way of storing weights by its name: a format of safetensors or GGUF, in any case, or mxfp4.

    Vectors of models in blocks are fp32; of fp8 models bf16. Raises RequestError for other names.
    """
    name = NAMES.get(asked.lower(), asked.upper())
    if name == "MXFP4":  # gpt-oss: only experts are packed
        return Stored("BF16", "MXFP4", "BF16")
    if name not in FORMATS or name[0] in "UIC" or name == "BOOL":
        known = [n.lower() for n in FORMATS if n[0] in "BFQ" and n not in ("BOOL", "F64")]
        raise RequestError(f"weights are {asked!r}; they can be {', '.join(known)}.")
    others = "BF16" if name.startswith("F8") else "F32" if FORMATS[name].block > 1 else name
    return Stored(name, name, others)


def tensor_bytes(tensor: Tensor, format: str) -> int:
    kind = FORMATS[format]
    rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    return rows * -(-columns // kind.block) * kind.size


def weights(model: Model, how: Stored, devices: int = 1) -> Part:
    """All weights, shared ones once; on each of several devices its share of matrices, and all vectors."""
    split = whole = 0
    for tensor in model.weights().values():
        size = tensor_bytes(tensor, how.of(tensor))
        if len(tensor.shape) >= 2:
            split += size
        else:
            whole += size
    total = -(-split // devices) + whole
    count = model.parameters()
    bits = 8 * (split + whole) / count
    share = f", matrices over {devices} devices, vectors on each" if devices > 1 else ""
    return Part("weights", total, f"{count:,} parameters at {bits:.2f} bits ({how.name}){share}")


def weights_of_file(sizes: Mapping[str, int], devices: int = 1) -> Part:
    """As a file stores them."""
    total = sum(sizes.values())
    share = f" over {devices} devices" if devices > 1 else ""
    return Part("weights", -(-total // devices), f"the {len(sizes):,} tensors of the file as stored{share}")


def read_in_a_step(model: Model, how: Stored, rows: int, answers: int | None = None) -> tuple[int, int]:
    """Bytes of weights that a step of so many rows reads, and operations with matrices (2 a multiply-add).

    Of the rows only `answers` (None: all) go through the head.
    Of a layer's experts those are read that any row picks: with count E and k picks of evenly spread
    rows, E * (1 - (1 - k/E)^rows) of them. Tables that are only looked up are not read.
    """
    read = flops = 0.0
    multiplied = {tensor.key for tensor in model.tensors() if tensor.multiplies}
    for tensor in model.weights().values():
        share = tensor.used / tensor.size
        if tensor.key in multiplied:
            flops += 2 * tensor.used
        elif len(tensor.shape) > 1:
            continue  # a table, of which a row is looked up
        read += tensor_bytes(tensor, how.of(tensor)) * (1 - (1 - share) ** rows)
    unanswered = rows - (rows if answers is None else answers)
    head = model.head.flops(model.trunk.width, unanswered) if model.head is not None and unanswered else 0
    return round(read), round(flops * rows - head)
