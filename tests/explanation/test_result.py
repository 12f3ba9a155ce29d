"""One kind of result: its axes, its order, its JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from qkv.errors import RequestError
from qkv.explanation import Axis, Evidence
from qkv.explanation.result import gathered, stacked

VALUES = np.array([[0.5, -3.0, 1.0], [2.0, np.nan, 1.0]])
EVIDENCE = Evidence(
    "ablation",
    VALUES,
    (Axis("layer", (1, 3)), Axis("token", ("the", "cat", "the"))),
    "logit lost",
    "zero",
    "logit of 7",
    {"own": 2.5, "gap": float("nan")},
)


def test_numbered_places_are_asked_by_number_and_texts_by_their_place() -> None:
    assert EVIDENCE.at(layer=3).values.tolist()[0] == 2.0
    assert float(EVIDENCE.at(layer=1, token=1)) == -3.0
    assert float(EVIDENCE.at(layer=1, token="cat")) == -3.0
    assert float(EVIDENCE.at(layer=-1, token=-1)) == 1.0
    assert float(EVIDENCE[3, 2]) == 1.0
    assert EVIDENCE[3].axes == (Axis("token", ("the", "cat", "the")),)


@pytest.mark.parametrize(
    "places, problem",
    [
        ({"layer": 0}, "0 is not on the axis layer"),
        ({"token": "the"}, "'the' stands more than once"),
        ({"token": 3}, "3 is not on the axis token"),
        ({"token": -4}, "-4 is not on the axis token"),
        ({"head": 1}, "There is no axis 'head': layer, token"),
    ],
)
def test_what_is_not_there_is_refused(places: dict[str, int | str], problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        EVIDENCE.at(**places)
    with pytest.raises(RequestError, match="3 places are asked for, and there are 2 axes"):
        EVIDENCE[1, 1, 1]


def test_the_top_is_by_size_or_by_what_is_asked_and_leaves_out_what_is_not_there() -> None:
    assert [one.value for one in EVIDENCE.top(3)] == [-3.0, 2.0, 1.0]
    assert EVIDENCE.top(1)[0].labels == {"layer": 1, "token": "cat"}
    assert EVIDENCE.top(4)[2].index == (0, 2)  # of equal ones the first
    assert [one.value for one in EVIDENCE.top(9, key=np.positive)] == [2.0, 1.0, 1.0, 0.5, -3.0]
    assert [one.value for one in EVIDENCE.top(1, key=np.negative)] == [-3.0]


def test_data_is_json_with_nothing_where_there_is_nothing() -> None:
    data = json.loads(json.dumps(EVIDENCE.data(), allow_nan=False))
    assert data["values"] == [[0.5, -3.0, 1.0], [2.0, None, 1.0]]
    assert data["facts"] == {"own": 2.5, "gap": None}
    assert data["axes"][1] == {"name": "token", "labels": ["the", "cat", "the"]}


def test_values_must_fit_their_labels_and_cannot_be_changed() -> None:
    with pytest.raises(RequestError, match=r"The values are \(2,\), and the labels of their axes \(3,\)"):
        Evidence("x", np.zeros(2), (Axis("token", ("a", "b", "c")),), "score")
    given = np.zeros(1)
    evidence = Evidence("x", given, (Axis("token", ("a",)),), "score")
    given[0] = 5
    assert float(evidence) == 0
    with pytest.raises(ValueError, match="read-only"):
        evidence.values[0] = 1
    with pytest.raises(RequestError, match="These are 6 numbers, not one"):
        float(EVIDENCE)


def test_arrays_are_put_together_with_nan_where_one_is_shorter() -> None:
    axes = (Axis("layer", (0, 1)), Axis("head", (0, 1)))
    assert np.array_equal(
        gathered({(0, 1): 2.0, (1, 0): 3.0}, axes), [[np.nan, 2.0], [3.0, np.nan]], equal_nan=True
    )
    both = stacked([np.ones((2, 1)), np.zeros((1, 2))])
    assert np.array_equal(both, [[[1, np.nan], [1, np.nan]], [[0, 0], [np.nan, np.nan]]], equal_nan=True)
