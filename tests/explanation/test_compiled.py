"""Case I3: taps fire in a model that torch has compiled, in generation and with its cache, and go again.

The compiler captures and guards as ever; its backend runs what was captured as it is, without C++, which
would take minutes to build.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from qkv.model import Model
from tests.engine.tiny import greedily, tiny

PROMPT = [3, 50, 7, 120, 9]
TOKENS = torch.tensor([PROMPT])


@pytest.fixture(scope="module")
def compiled() -> Iterator[Model]:
    captured = []

    def backend(graph: Any, inputs: Any) -> Any:
        captured.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = tiny(seed=4)
    model.network.compile(backend=backend)
    with torch.no_grad():
        model(TOKENS)  # the first call, with nothing tapped
    assert captured
    yield model
    torch._dynamo.reset()


def test_taps_that_come_after_the_first_compiled_call_fire_and_go(compiled: Model) -> None:
    """One capture for each layer, the values of the model itself; none once they are removed."""
    plain = tiny(seed=4)
    with torch.no_grad():
        own = plain(TOKENS)
        with plain.tap(["layers.*.attention.weights"]) as wanted:
            plain(TOKENS)
        with compiled.tap(["layers.*.attention.weights"]) as seen:
            assert torch.equal(compiled(TOKENS), own)
        assert [len(values) for values in seen.history.values()] == [1, 1]
        for name in wanted:
            assert torch.equal(seen[name], wanted[name])
        assert torch.equal(compiled(TOKENS), own)
        assert [len(values) for values in seen.history.values()] == [1, 1] and compiled.tapped is None

        def halved(x: Tensor) -> Tensor:
            return x * 0.5

        with plain.tap({"layers.0.output": halved}):
            changed = plain(TOKENS)
        with compiled.tap({"layers.0.output": halved}):
            assert torch.allclose(compiled(TOKENS), changed, atol=1e-6)
        assert (changed - own).abs().max() > 0.1 and torch.equal(compiled(TOKENS), own)


def test_taps_fire_in_generation_with_the_cache_of_a_compiled_model(compiled: Model) -> None:
    """One value a pass: the prompt's five tokens, then one token each; what is put there is what follows."""
    wanted, _ = greedily(tiny(seed=4), PROMPT, 3)
    with compiled.tap(["layers.*.output"]) as seen:
        done = compiled.generate(PROMPT, max_new_tokens=3, ignore_eos=True)
    assert done.tokens == wanted  # type: ignore[union-attr]
    assert [value.shape[1] for value in seen.history["layers.1.output"]] == [5, 1, 1]

    def other(x: Tensor) -> Tensor:
        return -x

    changed = tiny(seed=4)
    with changed.tap({"layers.0.attention.output": other}):
        wanted, _ = greedily(changed, PROMPT, 3)
    with compiled.tap({"layers.0.attention.output": other}):
        put = compiled.generate(PROMPT, max_new_tokens=3, ignore_eos=True)
    assert put.tokens == wanted != done.tokens  # type: ignore[union-attr]
    after = compiled.generate(PROMPT, max_new_tokens=3, ignore_eos=True)
    assert after.tokens == done.tokens  # type: ignore[union-attr]
