"""An independent NumPy forward pass, step by step: the packaged tiny models of glassllm."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from qkv.nn import Taps, Transformer, tap_names
from qkv.spec import Attention, Gated, Language, Model, RMSNorm, Rotary, Stack, Tokens, pre_norm
from tests.support import assert_close

PARTS = {
    "attention_before": "norm1.gamma",
    "attention.query": "attn.W_Q",
    "attention.key": "attn.W_K",
    "attention.value": "attn.W_V",
    "attention.output": "attn.W_O",
    "feed_forward_before": "norm2.gamma",
    "feed_forward.gate": "ffn.W1",
    "feed_forward.up": "ffn.W3",
    "feed_forward.down": "ffn.W2",
}
# their step: our tap
WHOLE = {"embed": "embedding", "norm.final": "final", "logits": "logits"}
STEPS = {
    "attn.v": "attention.value",
    "attn.rope_q": "attention.query",
    "attn.rope_k": "attention.key",
    "attn.mask": "attention.scores",
    "attn.softmax": "attention.weights",
    "attn.mix": "attention.heads",
    "attn.out": "attention.output",
    "resid.attn": "middle",
    "ffn.act": "feed_forward.hidden",
    "ffn.down": "feed_forward.output",
    "resid.ffn": "output",
}


@pytest.fixture(scope="module", params=["en", "pt"])
def theirs(request: pytest.FixtureRequest) -> Any:
    if importlib.util.find_spec("glassllm") is None:
        pytest.skip("glassllm is not installed")
    import glassllm

    return glassllm.load_pretrained(request.param)


def describe(config: Any) -> Model:
    head_dim = config.d_model // config.n_heads
    position = Rotary(config.rope_base, pairs="interleaved")
    attention = Attention(config.n_heads, config.n_kv_heads, head_dim, position=position)
    norm = RMSNorm(config.eps)
    layer = pre_norm(attention, Gated("silu", int(8 * config.d_model / 3)), norm=norm)
    tokens = Tokens(config.vocab_size, config.d_model, shared="tokens")
    return Model(
        decoder=Stack(tokens, (layer,) * config.n_layers, norm),
        head=Language(config.vocab_size, shared="tokens"),
    )


def transposed(array: torch.Tensor) -> torch.Tensor:
    return array.mT if array.ndim == 2 else array


def read(theirs: Any) -> Transformer:
    arrays = {name: torch.tensor(p.data) for name, p in theirs.named_parameters().items()}
    model = Transformer(describe(theirs.cfg))
    state = {"decoder.embedding.weight": arrays["E"], "decoder.norm.weight": arrays["norm_f.gamma"]}
    for i in range(theirs.cfg.n_layers):
        for ours, name in PARTS.items():
            state[f"decoder.layers.{i}.{ours}.weight"] = transposed(arrays[f"blocks.{i}.{name}"])
    model.load_state_dict(state | {"head.weight": arrays["E"]})
    return model


def test_every_step_agrees(theirs: Any) -> None:
    """To 1e-5: every step that has a tap here; what has none (norms, the projections before rotating,
    gate and up apart) feeds the next that has."""
    import glassllm

    network, tokenizer = theirs
    model = read(network)
    assert model.spec.parameters() == 852_608
    ids = tokenizer.encode("the little house by the river was")[: network.cfg.max_len]
    tracer = glassllm.Tracer()
    network.forward(ids, trace=tracer)
    taps = Taps(tap_names(model.spec), tap_names(model.spec))
    logits = model(torch.tensor([ids]), tap=taps)

    compared = 0
    for record in tracer.records:
        if record.id in WHOLE:
            ours = logits if record.id == "logits" else taps[WHOLE[record.id]]
        elif record.id in STEPS:
            ours = taps[f"layers.{record.layer}.{STEPS[record.id]}"]
        else:
            continue
        value = torch.tensor(record.value)
        if record.id == "attn.mix":
            value = value.transpose(0, 1)  # theirs has heads first
        ours = ours[0]
        seen = value.isfinite()
        assert torch.equal(seen, ours.isfinite()), record.id
        assert_close(ours[seen], value[seen])
        compared += 1
    assert compared == len(WHOLE) + len(STEPS) * network.cfg.n_layers
