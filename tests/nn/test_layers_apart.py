"""What a call works out once for all its layers is worked out for each kind of layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch

from qkv.nn import Layout
from qkv.spec import (
    Attention,
    Buckets,
    Causal,
    Disentangled,
    DynamicNTK,
    Everything,
    Gated,
    RelativeSinusoidal,
    RelativeTable,
    Rotary,
    Shaw,
    Window,
)
from tests.matrix.test_invariants import some_tokens
from tests.matrix.variants import attention, model, pre_norm
from tests.support import random_model

PAIRS: dict[str, tuple[Attention, Attention]] = {
    "masks": (attention(mask=Causal() & Window(3)), attention(mask=Causal() & Window(5))),
    "head-dims": (attention(head_dim=8), attention(head_dim=4)),
    "bases": (attention(position=Rotary(100.0)), attention(position=Rotary(50.0))),
    "lengths": (
        attention(position=Rotary(100.0, scaling=DynamicNTK(2.0, 8))),
        attention(position=Rotary(100.0, scaling=DynamicNTK(4.0, 8))),
    ),
    "clips": (attention(position=Shaw(2)), attention(position=Shaw(4))),
    "buckets": (attention(position=Buckets(8, 10)), attention(position=Buckets(6, 20))),
    "sides": (
        attention(position=Buckets(16, 10, bidirectional=True), mask=Everything()),
        attention(position=Buckets(8, 10, bidirectional=False), mask=Everything()),
    ),
    "sinusoids": (
        attention(position=RelativeSinusoidal(base=100.0)),
        attention(position=RelativeSinusoidal(base=10.0)),
    ),
    "reaches": (
        attention(position=Disentangled(RelativeTable(6), max_distance=3)),
        attention(position=Disentangled(RelativeTable(10), max_distance=5)),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_layers_that_differ_share_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = (pre_norm(mixer, Gated("silu", 20)) for mixer in PAIRS[name])
    network, tokens = random_model(model(*layers)), some_tokens(2)
    found = network(tokens)

    def always(layout: Layout, key: Hashable, compute: Callable[[], Any]) -> Any:
        return compute()

    monkeypatch.setattr(Layout, "once", always)
    assert torch.equal(found, network(tokens))
