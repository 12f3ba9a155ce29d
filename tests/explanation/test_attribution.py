"""What each component adds to a logit: the sum, and each by itself beside another way to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qkv.errors import UnsupportedError
from qkv.explanation import Difference, Logit, Probability, direct_attribution
from qkv.nn import Taps, Transformer, tap_names
from qkv.nn.norms import BatchNorm, DyT, LayerNorm, RMSNorm, ScaleNorm
from tests.explanation.cases import EVERY, METRIC, TOKENS, asked, beside, network, reading, tapped

NORMS = (LayerNorm, RMSNorm, ScaleNorm, BatchNorm, DyT)
FURTHER = ["mixers-alone", "dense-silu", "encoder-decoder-tied", "streaming", "values-are-keys", "biased"]


@pytest.mark.parametrize("variant", [*EVERY, *FURTHER])
def test_contributions_sum_to_the_logit(variant: str) -> None:
    logits, _ = tapped(variant, [])
    for metric, own in ((METRIC, asked(logits)), (Logit(5, 3), float(logits[0, 3, 5]))):
        found = direct_attribution(reading(variant), metric)
        assert float(found.values.sum()) == pytest.approx(own, abs=1e-4)
        assert found.facts["own"] == pytest.approx(own, abs=1e-5)
        assert abs(found.facts["gap"]) < 1e-4
        assert len(set(found.axes[0].labels)) == len(found.values)


class Held:
    """Norms as the affine maps they were in one pass: gain * (x - mean) + bias, in order of their calls."""

    def __init__(self, model: Transformer):
        self.norms = [part for part in model.trunk.modules() if isinstance(part, NORMS)]
        self.forwards = {norm: norm.forward for norm in self.norms}
        self.maps: dict[nn.Module, Tensor] = {}

    def learn(self) -> Held:
        for norm in self.norms:
            norm.forward = self._learning(norm)  # type: ignore[method-assign]
        return self

    def hold(self) -> None:
        for norm in self.norms:
            norm.forward = self._held(norm)  # type: ignore[method-assign]

    def free(self) -> None:
        for norm in self.norms:
            del norm.__dict__["forward"]

    def _learning(self, norm: nn.Module) -> Any:
        def forward(x: Tensor, *more: Any) -> Tensor:
            self.maps[norm] = x
            return self.forwards[norm](x, *more)  # type: ignore[no-any-return]

        return forward

    def _held(self, norm: Any) -> Any:
        """By the derivative of the norm with its statistics taken as constants."""
        x = self.maps[norm].double()
        if isinstance(norm, LayerNorm):
            size = ((x - x.mean(-1, keepdim=True)).square().mean(-1, keepdim=True) + norm.eps).sqrt()
        elif isinstance(norm, RMSNorm):
            size = (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        else:
            size = x.norm(dim=-1, keepdim=True)

        def forward(x: Tensor, *more: Any) -> Tensor:
            x = x.double()
            y = (x - x.mean(-1, keepdim=True) if isinstance(norm, LayerNorm) else x) / size
            y = y if norm.weight is None else y * (getattr(norm, "offset", 0) + norm.weight.double())
            return (y if getattr(norm, "bias", None) is None else y + norm.bias.double()).float()

        return forward


DIRECT = [
    "grouped", "biased", "parallel", "post-norm", "deep-norm", "sandwich", "reordered", "scaled-step",
    "layer-scale", "scale-norm", "gate-in-sandwich", "experts-softmax",
]  # fmt: skip


@pytest.mark.parametrize("variant", DIRECT)
def test_each_is_what_the_logit_loses_when_it_alone_is_taken_out(variant: str) -> None:
    """With all others' outputs and all norms held as they were: so the direct way only."""
    model, found = network(variant), direct_attribution(reading(variant), METRIC)
    mixers = [f"layers.{i}.{n}" for i, layer in enumerate(model.spec.trunk.layers) for n, _ in layer.mixers()]
    held = Held(model).learn()
    try:
        logits, taps = tapped(variant, ["embedding", *(f"{m}.*" for m in mixers)])
        held.hold()
        values = {name: taps[name] for name in ("embedding", *(f"{m}.output" for m in mixers))}

        def without(point: str, part: Tensor) -> float:
            changed = {**values, point: values[point] - part}
            with torch.no_grad():
                put = Taps(changed, tap_names(model.spec))
                return asked(model(TOKENS, tap=put, **beside(model)))

        assert without("embedding", torch.zeros(())) == pytest.approx(asked(logits), abs=1e-4)
        for mixer in mixers:
            label = mixer.removeprefix("layers.")
            output = f"{mixer}.output"
            if "feed_forward" in mixer:
                parts = {label: values[output]}
            else:
                matrix = model.trunk.get_parameter(f"{mixer}.output.weight").detach()
                heads = taps[f"{mixer}.heads"]
                dim = heads.shape[-1]
                parts = {
                    f"{label}.{h}": heads[:, :, h] @ matrix[:, h * dim : (h + 1) * dim].T
                    for h in range(heads.shape[2])
                }
            for name, part in parts.items():
                lost = asked(logits) - without(output, part)
                assert float(found.at(component=name)) == pytest.approx(lost, abs=2e-5), name
        lost = asked(logits) - without("embedding", values["embedding"])
        assert float(found.at(component="embedding")) == pytest.approx(lost, abs=2e-5)
    finally:
        held.free()


def test_a_capped_logit_is_shared_out_before_the_cap() -> None:
    from dataclasses import replace

    from qkv.explanation import Reading
    from qkv.spec import Language
    from tests.matrix.variants import VARIANTS, VOCAB
    from tests.support import random_model

    capped = random_model(replace(VARIANTS["grouped"], head=Language(VOCAB, cap=2.0, scale=0.7, bias=True)))
    found = direct_attribution(Reading(capped, TOKENS), Logit(4))
    own = capped(TOKENS)[0, -1, 4].detach() / 2
    assert float(found.values.sum()) == pytest.approx(float(2 * torch.atanh(own)), abs=1e-4)
    assert "before the cap" in found.score and "gap" not in found.facts


def test_a_class_of_a_token_is_shared_out_too() -> None:
    from qkv.explanation import Reading
    from qkv.spec import LayerNorm as Norm, Model, Stack, TokenClass, Tokens
    from tests.matrix.variants import ENCODER_LAYER, VOCAB, WIDTH
    from tests.support import random_model

    spec = Model(Stack(Tokens(VOCAB, WIDTH, norm=Norm()), (ENCODER_LAYER,) * 2), head=TokenClass(4))
    model = random_model(spec)
    found = direct_attribution(Reading(model, TOKENS), Difference(1, against=3, place=2))
    logits = model(TOKENS)[0, 2].detach()
    assert float(found.values.sum()) == pytest.approx(float(logits[1] - logits[3]), abs=1e-4)


def test_what_is_no_sum_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="probability of 3 at place -1 is no sum of logits"):
        direct_attribution(reading("grouped"), Probability(3))
    with pytest.raises(UnsupportedError, match="through a DyT"):
        direct_attribution(reading("dyt"), METRIC)
    with pytest.raises(UnsupportedError, match="not linear in the states"):
        direct_attribution(reading("tokens-projected"), METRIC)
