"""Parts kept in fp32 inside a half-precision model: they run, and the stream keeps its type."""

from __future__ import annotations

import pytest
import torch

from qkv.errors import CapacityError
from qkv.nn import ContiguousCache, Taps, tap_names
from tests.matrix.variants import VARIANTS, VOCAB
from tests.support import random_model, relative

SPEC = VARIANTS["qk-norm"]
TOKENS = torch.randint(0, VOCAB, (2, 6), generator=torch.Generator().manual_seed(8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "part",
    [
        "attention",
        "attention.query",
        "attention.key",
        "attention.value",
        "attention.output",
        "attention.query_norm",
        "attention_before",
        "feed_forward",
        "feed_forward.up",
        "feed_forward_before",
    ],
)
@pytest.mark.parametrize("cached", [False, True])
def test_one_float32_part_in_a_half_model(part: str, dtype: torch.dtype, cached: bool) -> None:
    """Case K10: cast at module borders."""
    exact, model = random_model(SPEC), random_model(SPEC).to(dtype)
    model.get_submodule(f"decoder.layers.0.{part}").float()
    taps = Taps(["layers.0.output", "layers.1.output"], tap_names(SPEC))
    cache = ContiguousCache(SPEC.trunk, 2, 6, dtype) if cached else None
    logits = model(TOKENS, cache=cache, tap=taps)
    assert logits.dtype == dtype
    assert taps["layers.0.output"].dtype == taps["layers.1.output"].dtype == dtype
    assert relative(logits, exact(TOKENS)) < 3e-2


@pytest.mark.parametrize(
    "problem", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_memory_that_runs_out_inside_a_pass_is_one_sentence(problem: Exception) -> None:
    model, cache = random_model(SPEC), ContiguousCache(SPEC.trunk, 2, 6)

    def full(value: torch.Tensor) -> torch.Tensor:
        raise problem

    with pytest.raises(CapacityError, match="no memory for a pass over 6 tokens in 2 rows"):
        model(TOKENS, cache=cache, tap=Taps({"layers.1.output": full}, tap_names(SPEC)))
    assert cache.length == 0
    model(TOKENS, cache=cache)
