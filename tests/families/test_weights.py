"""Weight tables read either way: each form by its numbers, and any of them there and back, bit for bit."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from qkv.errors import CheckpointError
from qkv.families import describe
from qkv.families.weights import Place, Table, WeightMap, fused, layer_names, pieces
from qkv.loading import weight_map

Tensors = dict[str, np.ndarray]


def written(ours: Tensors, table: Table) -> Tensors:
    places = WeightMap({name: values.shape for name, values in ours.items()}, table)
    return {name: places.write(name, ours.__getitem__) for name in places.theirs}


def read(theirs: Tensors, shapes: dict[str, tuple[int, ...]], table: Table) -> Tensors:
    places = WeightMap(shapes, table)
    return {name: places.read(name, theirs.__getitem__) for name in shapes}


def test_blocks_one_after_the_other() -> None:
    """Phi-3: the rows of the query, then those of the key."""
    ours = {"q": np.array([[1], [2], [3], [4]]), "k": np.array([[5], [6]])}
    assert written(ours, fused("qk", "q", "k"))["qk"].ravel().tolist() == [1, 2, 3, 4, 5, 6]


def test_parts_stand_in_their_order_not_in_ours() -> None:
    ours = {"q": np.array([[1], [2]]), "k": np.array([[5]])}
    assert written(ours, fused("kq", "k", "q"))["kq"].ravel().tolist() == [5, 1, 2]


def test_a_group_has_its_own_of_each() -> None:
    """Falcon 40B: with two groups, two queries and a key, then again."""
    ours = {"q": np.array([[1], [2], [3], [4]]), "k": np.array([[5], [6]])}
    assert written(ours, fused("qk", "q", "k", groups=2))["qk"].ravel().tolist() == [1, 2, 5, 3, 4, 6]


def test_each_head_has_its_query_key_and_value_in_turn() -> None:
    """Case K4, GPT-NeoX and BLOOM: two heads of two dimensions, twelve rows."""
    theirs, shapes = {"qkv": np.arange(12)[:, None]}, dict.fromkeys("qkv", (4, 1))
    found = read(theirs, shapes, fused("qkv", *"qkv", groups=2))
    assert {name: rows.ravel().tolist() for name, rows in found.items()} == {
        "q": [0, 1, 6, 7],
        "k": [2, 3, 8, 9],
        "v": [4, 5, 10, 11],
    }


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        (
            {"model_type": "gpt_neox", "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 4,
             "intermediate_size": 8, "vocab_size": 9, "max_position_embeddings": 7, "rotary_pct": 1.0},
            "gpt_neox.layers.0.attention.query_key_value",
        ),
        (
            {"model_type": "bloom", "n_layer": 1, "n_head": 2, "hidden_size": 4, "vocab_size": 9},
            "transformer.h.0.self_attention.query_key_value",
        ),
    ],
)  # fmt: skip
def test_the_heads_of_gpt_neox_and_bloom_take_turns(sizes: dict[str, Any], name: str) -> None:
    """Case K4 in the tables of those families, for weights and biases."""
    places, rows = weight_map(describe(sizes)), np.arange(12)
    theirs = {f"{name}.bias": rows, f"{name}.weight": np.repeat(rows[:, None], 4, 1)}
    expected = {"query": [0, 1, 6, 7], "key": [2, 3, 8, 9], "value": [4, 5, 10, 11]}
    for part, own in expected.items():
        ours = f"decoder.layers.0.attention.{part}"
        assert places.read(f"{ours}.bias", theirs.__getitem__).tolist() == own
        assert places.read(f"{ours}.weight", theirs.__getitem__)[:, 3].tolist() == own


def test_the_biases_of_qwen2_are_72_of_290_tensors() -> None:
    """Case K6: queries, keys and values of 24 layers have one, outputs none, and saving writes them all."""
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "vocab_size": 151936,
             "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
             "max_position_embeddings": 32768}  # fmt: skip
    stored = weight_map(describe({"model_type": "qwen2", **sizes})).theirs
    biases = [name for name in stored if name.endswith(".bias")]
    assert len(stored) == 290 and len(biases) == 72
    assert {name.split(".")[-2] for name in biases} == {"q_proj", "k_proj", "v_proj"}


def test_rows_that_take_turns_in_a_stack_stored_the_other_way_round() -> None:
    """gpt-oss: (expert, in, out), its last axis gate, up, gate, up."""
    gate, up = np.array([[[1, 2], [3, 4]]]), np.array([[[5, 6], [7, 8]]])
    table = fused("both", "gate", "up", groups=2, axis=1, transposed=True)
    assert written({"gate": gate, "up": up}, table)["both"].tolist() == [[[1, 5, 3, 7], [2, 6, 4, 8]]]


def test_a_stack_is_a_tensor_for_each_expert() -> None:
    ours = {"layers.3.expert.up": np.arange(6).reshape(3, 2, 1)}
    theirs = written(ours, {"layers.{layer}.expert.up": "model.{layer}.experts.{expert}.w3"})
    assert {name: values.ravel().tolist() for name, values in theirs.items()} == {
        "model.3.experts.0.w3": [0, 1],
        "model.3.experts.1.w3": [2, 3],
        "model.3.experts.2.w3": [4, 5],
    }


def test_another_shape_in_the_same_order() -> None:
    ours = {"convolution": np.arange(6).reshape(2, 3)}
    table = {"convolution": Place("conv1d", shape=(2, 1, 3))}
    theirs = written(ours, table)
    assert theirs["conv1d"].tolist() == [[[0, 1, 2]], [[3, 4, 5]]]
    assert read(theirs, {"convolution": (2, 3)}, table)["convolution"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_vector_is_not_transposed() -> None:
    names = layer_names("h.{layer}", {"up": Place("fc", transposed=True)})
    assert names["decoder.layers.{layer}.up.weight"] == Place("h.{layer}.fc.weight", transposed=True)
    assert names["decoder.layers.{layer}.up.bias"] == Place("h.{layer}.fc.bias")


def test_a_name_of_one_layer_goes_before_that_of_all() -> None:
    table = {"layers.{layer}.norm": "{layer}.norm", "layers.1.norm": "other"}
    found = [piece.place.name for piece in pieces({f"layers.{i}.norm": (2,) for i in range(3)}, table)]
    assert found == ["0.norm", "other", "2.norm"]


def test_a_tensor_without_a_name_is_an_error() -> None:
    with pytest.raises(CheckpointError, match=r"^No checkpoint name is known for layers\.2\.gate\.$"):
        list(pieces({"layers.2.gate": (2,)}, {"layers.{layer}.up": "up"}))


def test_names_are_made_one_at_a_time() -> None:
    """A configuration may ask for more experts than there is memory for their names."""
    assert next(pieces({"up": (1 << 60, 2)}, {"up": "{expert}.up"})).place.name == "0.up"


@st.composite
def tables(draw: st.DrawFn) -> tuple[Tensors, Table]:
    """One group of tensors of ours, of any sizes, and a form that holds them."""
    groups, axis = draw(st.integers(1, 4)), draw(st.integers(0, 1))
    size = st.integers(1, 4)
    shape = [draw(size) for _ in range(draw(st.integers(2, 3)))]
    hypothesis.assume(axis < len(shape))
    ours: Tensors = {}
    random = np.random.default_rng(draw(st.integers(0, 99)))
    for i in range(draw(st.integers(1, 3))):
        own = [*shape[:axis], groups * draw(size), *shape[axis + 1 :]]
        ours[f"part{i}"] = random.normal(size=own).astype(np.float32)
    table: dict[str, str | Place] = dict(
        fused("whole", *ours, groups=groups, axis=axis, transposed=draw(st.booleans()))
    )
    stack = random.normal(size=[draw(size), *shape]).astype(np.float32)
    ours |= {"stack": stack, "kernel": stack.copy(), "bits": random.integers(0, 1 << 16, shape, np.uint16)}
    table |= {
        "stack": Place("{head}.each", transposed=draw(st.booleans())),
        "kernel": Place("kernel", shape=(1, *stack.shape[::-1])),
        "bits": "bits",
    }
    return ours, table


@hypothesis.given(tables())
def test_what_is_written_reads_as_it_was(given: tuple[Tensors, Table]) -> None:
    ours, table = given
    shapes = {name: values.shape for name, values in ours.items()}
    theirs = written(ours, table)
    places = WeightMap(shapes, table)
    assert {name: values.shape for name, values in theirs.items()} == {
        name: places.shape(name) for name in places.theirs
    }
    for name, values in read(theirs, shapes, table).items():
        assert values.dtype == ours[name].dtype and values.tobytes() == ours[name].tobytes(), name
    again = written(read(theirs, shapes, table), table)
    assert all(again[name].tobytes() == values.tobytes() for name, values in theirs.items())
