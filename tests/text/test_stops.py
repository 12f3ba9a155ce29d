import pytest
from hypothesis import given, strategies as st

from qkv.errors import RequestError
from qkv.text import StopStrings


def run(stops, chunks):
    """All the text given out, and the stop that was met."""
    stopper, text = StopStrings(stops), ""
    for chunk in chunks:
        emitted, stopped = stopper.push(chunk)
        text += emitted
        if stopped is not None:
            return text, stopped
    return text + stopper.flush(), None


@pytest.mark.parametrize(("stop", "text"), [("DE", "ABC"), ("FG", "ABCDE")])
def test_a_stop_is_matched_in_the_text_and_cut_exactly(stop, text):
    """Case G1: a stop may begin a token or lie across two."""
    assert run([stop], ["ABC", "DEF", "GHI"]) == (text, stop)


def test_only_a_proper_prefix_of_a_stop_is_held_back():
    stopper = StopStrings(["</s>", "END"])
    assert stopper.push("a </") == ("a ", None)
    assert stopper.push("b>") == ("</b>", None)
    assert stopper.push("EEN") == ("E", None)
    assert stopper.flush() == "EN"


def test_nothing_is_given_out_after_the_stop():
    stopper = StopStrings(["."])
    assert stopper.push("a.b") == ("a", ".")
    assert stopper.push("c") == ("", ".")
    assert stopper.flush() == ""


def test_no_stops_hold_nothing_back():
    assert run([], ["a", "b"]) == ("ab", None)


@pytest.mark.parametrize("stops", ["END", [""], ["a", 3]])
def test_a_stop_that_is_no_text_is_refused(stops):
    with pytest.raises(RequestError, match="stop must be a list of strings"):
        StopStrings(stops)


@given(st.lists(st.text("ab", max_size=4)), st.text("ab", min_size=1, max_size=4))
def test_one_stop_cuts_where_the_whole_text_first_holds_it(chunks, stop):
    text = "".join(chunks)
    assert run([stop], chunks) == (text.split(stop)[0], stop if stop in text else None)


@given(st.lists(st.text("abc", max_size=4)), st.lists(st.text("abc", min_size=1, max_size=4), max_size=4))
def test_of_several_stops_the_one_completed_first_counts(chunks, stops):
    text = "".join(chunks)
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            stop = max(met, key=len)
            assert run(stops, chunks) == (text[: end - len(stop)], stop)
            return
    assert run(stops, chunks) == (text, None)
