"""Descriptions go to JSON and back, print as the code that builds them, and say what differs."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from itertools import pairwise

import pytest

from qkv import spec
from qkv.errors import ConfigError
from qkv.spec import (
    Attention,
    Branch,
    Causal,
    Dense,
    Documents,
    Everything,
    Gated,
    Language,
    Layer,
    LayerNorm,
    Model,
    Or,
    Padding,
    Prefix,
    RMSNorm,
    Rotary,
    Stack,
    Sublayer,
    Tokens,
    Window,
    Yarn,
    arrangement,
    difference,
    from_json,
    parallel,
    post_norm,
    pre_norm,
    reordered,
    sandwich,
    step,
    to_json,
)
from tests.spec import descriptions as of

A, F = Attention(2, 1, 4), Gated("silu", 5)


def changed(model: Model, places: tuple[int, ...], layer: Layer) -> Model:
    """The same with another layer at these places."""
    assert model.decoder is not None
    layers = tuple(layer if i in places else old for i, old in enumerate(model.decoder.layers))
    return replace(model, decoder=replace(model.decoder, layers=layers))


# --- JSON -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", of.ALL)
def test_json_round_trip(name: str) -> None:
    model = of.ALL[name]()
    again = from_json(to_json(model))
    assert again == model and hash(again) == hash(model)
    assert isinstance(again, Model)
    assert again.weights() == model.weights()
    assert to_json(again) == to_json(model)


def test_json_leaves_out_defaults() -> None:
    assert json.loads(to_json(Attention(2, 1, 4, mask=Causal() & Window(3), position=Rotary(1e6)))) == {
        "kind": "Attention",
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 4,
        "position": {"kind": "Rotary", "theta": 1e6},
        "mask": {"kind": "And", "left": {"kind": "Causal"}, "right": {"kind": "Window", "before": 3}},
    }


def test_no_field_is_called_kind() -> None:
    """JSON keeps a part's class there."""
    assert all(f.name != "kind" for kind in spec.Node.kinds.values() for f in fields(kind))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "This description is not valid JSON: Expecting property name enclosed in double quotes"),
        ("[]", "A description is a JSON object with a 'kind'."),
        ("3", "A description is a JSON object with a 'kind'."),
        ('{"heads": 2}', "A part of a description has no 'kind'."),
        ('{"kind": "Atention"}', "A description has a part of unknown kind 'Atention'."),
        ('{"kind": ["Attention"]}', "A description has a part of unknown kind ['Attention']."),
        ('{"kind": "Window", "befor": 3}', "Window has no field 'befor' (shared, before, after)."),
        ('{"kind": "Window"}', "Window lacks its 'before'."),
        ('{"kind": "Window", "before": "3"}', "Window.before is '3'; it must be a whole number."),
        ('{"kind": "Window", "before": true}', "Window.before is True; it must be a whole number."),
        ('{"kind": "Window", "before": 3.0}', "Window.before is 3.0; it must be a whole number."),
        ('{"kind": "Rotary", "theta": null}', "Rotary.theta is null; it must be a number."),
        (
            '{"kind": "Rotary", "scaling": {"kind": "Causal"}}',
            "Rotary.scaling is Causal; it must be Scaling or null.",
        ),
        (
            '{"kind": "Global", "positions": [0, "1"]}',
            "Global.positions is [0, '1']; it must be a list, each",
        ),
        (
            '{"kind": "Layer", "sublayers": {"kind": "Causal"}}',
            "Layer.sublayers is Causal; it must be a list",
        ),
        (
            '{"kind": "Rotary", "pairs": "halves"}',
            "Rotary.pairs is 'halves'; it must be 'half' or 'interleaved'.",
        ),
        ("[" * 100_000, "This description is nested too deeply."),
    ],
)
def test_json_errors_name_kind_and_field(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_json(text)
    assert str(caught.value).startswith(message)


def test_json_errors_reach_inner_parts() -> None:
    data = json.loads(to_json(of.gpt2(2, 8, 2, 11, 5)))
    del data["decoder"]["layers"][1]["sublayers"][0]["branches"][0]["mixer"]["heads"]
    with pytest.raises(ConfigError, match=r"^Attention lacks its 'heads'\.$"):
        from_json(json.dumps(data))


# --- text -------------------------------------------------------------------------------------

GEMMA = """\
Model(
  decoder=Stack(
    input=Tokens(vocab=262_144, width=640, scale=25.0, shared="tokens"),
    layers=(
      # 6 layers: 0-4, 6
      sandwich(
        Attention(
          heads=4,
          kv_heads=1,
          head_dim=256,
          score=Score(scale=0.0625),
          position=Rotary(),
          mask=Causal() & Window(512),
          projections=Projections(norm=RMSNorm(offset=1.0)),
        ),
        Gated("gelu_tanh", 2048),
        norm=RMSNorm(offset=1.0),
      ),
      # layer 5
      sandwich(
        Attention(
          heads=4,
          kv_heads=1,
          head_dim=256,
          score=Score(scale=0.0625),
          position=Rotary(theta=1_000_000.0, scaling=Interpolation(8)),
          projections=Projections(norm=RMSNorm(offset=1.0)),
        ),
        Gated("gelu_tanh", 2048),
        norm=RMSNorm(offset=1.0),
      ),
    ),
    norm=RMSNorm(offset=1.0),
  ),
  head=Language(262_144, shared="tokens"),
)"""

GPT_2 = """\
Model(
  decoder=Stack(
    input=Tokens(vocab=50_257, width=768, position=Learned(1024), shared="tokens"),
    layers=(
      # 12 layers: 0-11
      pre_norm(
        Attention(heads=12, kv_heads=12, head_dim=64, projections=Projections(bias="qkvo")),
        Dense("gelu_tanh", 3072),
      ),
    ),
    norm=LayerNorm(),
  ),
  head=Language(50_257, shared="tokens"),
)"""


def test_text_of_whole_models() -> None:
    assert str(of.gpt2()) == GPT_2
    gemma = of.gemma3(7, 640, 4, 1, 256, 2048, 262144, 512, 256)
    assert gemma.decoder is not None
    round_scale = replace(gemma.decoder.input, scale=25.0)
    assert str(replace(gemma, decoder=replace(gemma.decoder, input=round_scale))) == GEMMA


@pytest.mark.parametrize("name", of.ALL)
def test_text_is_the_code_that_builds_it(name: str) -> None:
    """All of it but the folding: each layer, input, head and tower part evaluates to itself."""
    model = of.ALL[name]()
    stacks = [stack for stack in (model.encoder, model.decoder, *(t.stack for t in model.towers)) if stack]
    parts = [part for stack in stacks for part in (stack.input, stack.norm, *set(stack.layers))]
    parts += [model.head, *(tower.projector for tower in model.towers)]
    for part in parts:
        assert eval(str(part), vars(spec)) == part


def test_text_says_where_layers_stand() -> None:
    def comments(model: Model) -> list[str]:
        return [line.strip() for line in str(model).splitlines() if "#" in line]

    assert comments(of.gpt2()) == ["# 12 layers: 0-11"]
    assert comments(of.deepseek_v3()) == ["# 3 layers: 0-2", "# 58 layers: 3-60"]
    assert comments(of.gpt_oss()) == ["# 12 layers: 0, 2, ... 22", "# 12 layers: 1, 3, ... 23"]
    assert comments(of.gemma3()) == [
        "# 52 layers: 0-4, 6-10, 12-16, 18-22, 24-28, 30-34, 36-40, 42-46, 48-52, 54-58, 60-61",
        "# 10 layers: 5, 11, ... 59",
    ]
    assert comments(of.nemotron_h("M-*M-M-")) == ["# 3 layers: 0, 3, 5", "# 3 layers: 1, 4, 6", "# layer 2"]


@pytest.mark.parametrize("name", of.ALL)
def test_text_is_short(name: str) -> None:
    lines = str(of.ALL[name]()).splitlines()
    assert len(lines) <= 75 and max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (Causal() & Window(3), "Causal() & Window(3)"),
        ((Causal() | Prefix()) & Documents(), "(Causal() | Prefix()) & Documents()"),
        (Causal() & Window(3) | Prefix(), "Causal() & Window(3) | Prefix()"),
        (Causal() & (Padding() & Documents()), "Causal() & (Padding() & Documents())"),
        (Or(Causal(), Or(Prefix(), Padding())), "Causal() | (Prefix() | Padding())"),
        (Window(65, 64), "Window(65, after=64)"),
        (Yarn(4, 32768), "Yarn(factor=4, original=32_768)"),
        (F, 'Gated("silu", 5)'),
        (Language(11, shared="tokens"), 'Language(11, shared="tokens")'),
        (LayerNorm(1e-12), "LayerNorm(eps=1e-12)"),
        (step(F, scale=0.5), 'step(Gated("silu", 5), scale=0.5)'),
        (Sublayer((Branch(F, RMSNorm()),)), 'Sublayer((Branch(mixer=Gated("silu", 5), norm=RMSNorm()),))'),
        (pre_norm(F, scale=0.5), 'pre_norm(Gated("silu", 5), scale=0.5)'),
        (Layer((step(F),)), 'Layer((step(Gated("silu", 5)),))'),
    ],
)
def test_text_of_parts(node: spec.Node, text: str) -> None:
    assert str(node) == text
    assert eval(text, vars(spec)) == node


def test_arrangements_are_recognised() -> None:
    norm = RMSNorm()
    for layer, name in (
        (pre_norm(A, F, norm=norm, scale=0.2), "pre_norm"),
        (post_norm(A, F, norm=norm, skip=2.0), "post_norm"),
        (sandwich(A, F, norm=norm), "sandwich"),
        (reordered(A, F, norm=norm), "reordered"),
        (parallel(A, F, norm=norm), "parallel"),
        (parallel(A, F, norm=norm, norms=2), "parallel"),
    ):
        found = arrangement(layer)
        assert found is not None and found[0] == name and found[1]["norm"] == norm
    assert arrangement(Layer((step(A), step(F, before=norm)))) is None
    assert arrangement(Layer((step(A, before=norm), step(F, before=LayerNorm())))) is None


# --- difference -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", of.ALL)
def test_nothing_differs_from_itself(name: str) -> None:
    assert of.ALL[name]() - of.ALL[name]() == ()


def test_one_change_is_one_path() -> None:
    model = of.llama()
    assert model.decoder is not None
    wider = replace(model, head=Language(128_257))
    assert [str(d) for d in model - wider] == ["head.vocab: 128_256 -> 128_257"]
    normed = replace(model, decoder=replace(model.decoder, norm=RMSNorm(1e-6)))
    assert [str(d) for d in model - normed] == ["decoder.norm.eps: 1e-05 -> 1e-06"]
    bare = replace(model, head=None)
    assert [str(d) for d in model - bare] == ["head: Language(128_256) -> None"]


def test_equal_differences_of_many_layers_are_folded() -> None:
    plain, windowed = of.llama(), of.llama(mask=Causal() & Window(4096))
    assert [str(d) for d in plain - windowed] == [
        "decoder.layers[0-31].attention.mask: Causal() -> Causal() & Window(4096)"
    ]
    assert windowed.decoder is not None
    some = changed(plain, (3, 7, 8), windowed.decoder.layers[0])
    assert [d.path for d in plain - some] == ["decoder.layers[3, 7-8].attention.mask"]


def test_llama_against_qwen() -> None:
    llama = of.llama(layers=4, scaling=None, theta=1e6)
    qwen = of.qwen3(4, 4096, 32, 8, 128, 151936, Gated("silu", 14336))
    assert [str(d) for d in llama - qwen] == [
        "decoder.input.vocab: 128_256 -> 151_936",
        "decoder.layers[0-3].attention_before.eps: 1e-05 -> 1e-06",
        "decoder.layers[0-3].attention.projections.norm: None -> RMSNorm()",
        "decoder.layers[0-3].feed_forward_before.eps: 1e-05 -> 1e-06",
        "decoder.norm.eps: 1e-05 -> 1e-06",
        "head.vocab: 128_256 -> 151_936",
    ]


def test_more_layers_and_other_kinds() -> None:
    few, more = of.llama(layers=2), of.llama(layers=4)
    assert [(d.path, d.left) for d in few - more] == [("decoder.layers[2-3]", None)]
    assert [(d.path, d.right) for d in more - few] == [("decoder.layers[2-3]", None)]
    encoder = replace(A, mask=Everything())
    assert [str(d) for d in difference(A, encoder)] == ["mask: Causal() -> Everything()"]
    assert [str(d) for d in difference(pre_norm(A, F), pre_norm(A, Dense("relu", 5)))] == [
        'feed_forward: Gated("silu", 5) -> Dense("relu", 5)'
    ]


def test_side_by_side_and_one_after_another_differ() -> None:
    assert [str(d) for d in difference(pre_norm(A, F), parallel(A, F))] == [
        'steps: "attention, feed_forward" -> "attention + feed_forward"',
        "feed_forward_before: LayerNorm() -> None",
    ]
    swapped = difference(pre_norm(A, F), pre_norm(F, A))
    assert [str(d) for d in swapped] == ['steps: "attention, feed_forward" -> "feed_forward, attention"']


def test_unequal_descriptions_never_look_equal() -> None:
    for name, other in pairwise(of.ALL):
        assert of.ALL[name]() - of.ALL[other]() != (), (name, other)


def test_a_description_is_a_value() -> None:
    """Frozen, hashable, and equal by content."""
    stack = Stack(Tokens(11, 8), (pre_norm(A, F),))
    assert {stack: 1}[Stack(Tokens(11, 8), (pre_norm(A, F),))] == 1
    with pytest.raises(AttributeError):
        A.heads = 3  # type: ignore[misc]
    assert A.heads == 2


def test_a_model_without_stacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="has an encoder, a decoder, or both"):
        Model().parameters()
