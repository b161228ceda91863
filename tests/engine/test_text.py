"""Text comes out whole and early; of a stop nothing comes out at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure.engine.text import StopMatcher, TextStream
from tenure.types import Sampling

EOS = frozenset({0})


class Letters:
    """Token 1 is "a", 2 is "b", …; 90 is the first half of "é", 91 the second."""

    def __init__(self) -> None:
        self.half = False

    def push(self, token: int) -> str:
        if token == 90:
            self.half = True
            return ""
        if token == 91:
            self.half = False
            return "é"
        return chr(96 + token)

    def finish(self) -> str:
        return "\ufffd" if self.half else ""


def stream(sampling: Sampling) -> TextStream:
    return TextStream(Letters(), sampling, EOS)


def said(made: TextStream, tokens: list[int]) -> tuple[str, list[str]]:
    """Push tokens until one is a stop; all the text, and the pieces as they were let out."""
    pieces = []
    for token in tokens:
        stopped = made.push(token)
        pieces.append(made.take()[0])
        if stopped:
            break
    made.end()
    pieces.append(made.take()[0])
    return "".join(pieces), pieces


@given(st.text("ab", max_size=30), st.text("ab", min_size=1, max_size=4), st.data())
def test_one_stop_string_whatever_the_pieces(text: str, stop: str, data: st.DataObject) -> None:
    matcher = StopMatcher([stop])
    shown, found, at = "", None, 0
    while at < len(text) and found is None:
        size = data.draw(st.integers(1, 5))
        safe, found = matcher.push(text[at : at + size])
        shown += safe
        at += size
        assert stop not in shown
        # Held back no longer than needed: only what could still become the stop.
        assert found or stop.startswith(text[len(shown) : at])
    if found is None:
        shown += matcher.finish()
    assert shown == text.split(stop)[0]
    assert (found is None) == (stop not in text)


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4))
def test_several_stop_strings(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown, found = "", None
    for letter in text:
        safe, found = matcher.push(letter)
        shown += safe
        if found is not None:
            break
    else:
        shown += matcher.finish()
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    assert (found is None) == (not any(stop in text for stop in stops))
    if found is not None:
        assert text[len(shown) :].startswith(found)


def test_plain_text_is_let_out_at_once() -> None:
    text, pieces = said(stream(Sampling()), [1, 2, 3])
    assert (text, pieces) == ("abc", ["a", "b", "c", ""])


def test_half_characters_wait_for_their_other_half() -> None:
    text, pieces = said(stream(Sampling()), [1, 90, 91, 90])
    assert (text, pieces) == ("aé\ufffd", ["a", "", "é", "", "\ufffd"])


@pytest.mark.parametrize(
    ("sampling", "tokens", "text", "by"),
    [
        (Sampling(), [1, 0, 2], "a", None),
        (Sampling(stop_token_ids=(3,)), [1, 3, 2], "a", 3),
        (Sampling(stop=("bc",)), [1, 2, 3, 4], "a", "bc"),
        (Sampling(stop=("bcd",)), [1, 2, 3, 0], "abc", None),  # eos: what was held back was no stop
        (Sampling(stop=("", "c")), [1, 2, 3], "ab", "c"),
        (Sampling(stop_token_ids=(0,)), [1, 0], "a", 0),
    ],
)
def test_stops(sampling: Sampling, tokens: list[int], text: str, by: object) -> None:
    made = stream(sampling)
    assert said(made, tokens)[0] == text
    assert made.stopped
    assert made.stopped_by == by


def test_ignoring_eos_goes_on() -> None:
    made = TextStream(Letters(), Sampling(ignore_eos=True), frozenset({5}))
    assert said(made, [1, 5, 2])[0] == "aeb"
    assert not made.stopped


def test_end_of_length_lets_out_what_was_held_back() -> None:
    made = stream(Sampling(stop=("abc",)))
    made.push(1)
    made.push(2)
    assert made.take() == ("", (1, 2))
    made.end()
    assert made.take() == ("ab", ())
    assert not made.stopped


def test_stop_completed_by_the_end_is_still_a_stop() -> None:
    made = stream(Sampling(stop=("a\ufffd",)))
    assert said(made, [2, 1, 90]) == ("b", ["b", "", "", ""])
    assert made.stopped_by == "a\ufffd"
