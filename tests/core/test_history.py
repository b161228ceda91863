from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure.cache.ghosts import Ghost
from tenure.cache.history import History
from tenure.cache.plan import Lost
from tenure.types import Key, Miss, MissReason, Request, Scope, Span, Token

B = 4
TEXT = {1: "a", 2: "b", 3: "c", 12: "ab", 23: "bc", 123: "abc", 99: "."}
SCOPE = Scope("m")


def why_not(a: Sequence[Token], b: Sequence[Token]) -> MissReason | None:
    """Everything up to a 77 is reasoning."""
    x, y = ("".join(TEXT.get(token, f"<{token}>") for token in run) for run in (a, b))
    if x.startswith(y) or y.startswith(x):
        return "retokenised"
    rest = x.partition("<77>")[2]
    return "reasoning_stripped" if rest and (y.startswith(rest) or rest.startswith(y)) else None


def history(heads: bool = True, **bounds: int) -> History:
    return History(B, heads=heads, why_not=why_not, **bounds)


def chat(*messages: Sequence[int], session: str | None = None, scope: Scope = SCOPE, name: str = "r") -> Request:
    """A request whose prompt is `messages`, one span each."""
    spans, at = [], 0
    for i, message in enumerate(messages):
        spans.append(Span(at, at + len(message), i))
        at += len(message)
    ids = tuple(token for message in messages for token in message)
    return Request(name, ids, scope, session_id=session, spans=tuple(spans))


def remember(past: History, request: Request, answer: Sequence[int] = (), computed: int | None = None) -> None:
    ids = [*request.tokens, *answer]
    past.remember(request, ids, len(ids) - 1 if computed is None else computed)


SYSTEM, ASKED, ANSWER, MORE = [50, 51, 52, 53, 54], [60, 61, 62], [1, 2, 3], [70, 71]


def test_the_first_of_its_kind_is_cold() -> None:
    past = history()
    assert past.explain(chat(SYSTEM, ASKED), 0) == Miss("cold", 0, 0)
    assert past.explain(chat(), 0) is None


def test_as_much_as_possible_is_no_miss() -> None:
    past = history()
    assert past.explain(chat(SYSTEM, ASKED), 7) is None
    assert history(heads=False).explain(chat(SYSTEM, ASKED), 0) == Miss("cold", 0, 0)


def test_a_codec_without_heads_tells_of_less_than_a_block_too() -> None:
    """A prompt shorter than a block was not held just because its codec could reuse nothing of it."""
    short = chat([7, 8, 9])
    past = history(heads=False)
    assert past.explain(short, 0) == Miss("cold", 0, 0)
    remember(past, short, [70, 71])
    assert past.explain(short, 0) is None  # its block is full by now
    gone = Lost(2, "evicted", Ghost(3.0, "lru", "evicted", Key(b""), b""), older=False)
    miss = past.explain(short, 0, gone, 5.0)
    assert miss is not None and (miss.reason, miss.at_token, miss.by, miss.ago_s) == ("evicted", 0, "lru", 2.0)


def test_of_a_block_that_serves_only_whole_the_head_is_a_miss_of_its_own() -> None:
    """Where nothing differs: a text that does says more."""
    past = history(heads=False)
    remember(past, chat(SYSTEM, ASKED), [70, 71])
    head = Lost(2, "below_minimum", None, older=False)
    assert past.explain(chat(SYSTEM, ASKED[:2]), 4, head) == Miss("below_minimum", 4, 0)
    assert past.explain(chat(SYSTEM, [ASKED[0], 99, 98, 97]), 4, head).reason == "cold"  # type: ignore[union-attr]
    assert History(B, heads=False, why_not=why_not).explain(chat([1, 2, 3]), 0, head) == Miss("below_minimum", 0, 0)
    known = past.explain(chat(SYSTEM, ASKED), 0, head)  # whole blocks are gone too, for a reason nobody remembers
    assert known is not None and known.reason == "unknown"


@pytest.mark.parametrize("session", [None, "s"])
def test_a_next_turn_that_reuses_all_earlier_tokens_is_no_miss(session: str | None) -> None:
    past = history()
    remember(past, chat(SYSTEM, ASKED, session=session), ANSWER)
    turn = chat(SYSTEM, ASKED, ANSWER, MORE, session=session)
    assert past.explain(turn, 10) is None  # the answer's last token has no KV yet
    assert past.explain(turn, 9) == Miss("evicted", 9, 2)
    assert past.explain(turn, 0) == Miss("evicted", 0, 0)


def test_what_was_never_computed_was_not_evicted() -> None:
    past = history()
    remember(past, chat(SYSTEM, ASKED), computed=3)
    assert past.explain(chat(SYSTEM, ASKED), 3) == Miss("cold", 3, 0)
    assert past.explain(chat(SYSTEM, ASKED), 2) == Miss("evicted", 2, 0)
    remember(past, chat(ASKED), ANSWER, computed=0)
    assert past.explain(chat(ASKED), 0) == Miss("cold", 0, 0)


def test_asking_again_for_a_shorter_prompt() -> None:
    past = history()
    remember(past, chat(SYSTEM, ASKED), ANSWER)
    assert past.explain(chat(SYSTEM), 4) is None
    assert past.explain(chat(SYSTEM), 0) == Miss("evicted", 0, 0)


def test_a_codec_without_heads_reuses_whole_blocks_only() -> None:
    past = history(heads=False)
    remember(past, chat(SYSTEM, ASKED), ANSWER)
    turn = chat(SYSTEM, ASKED, ANSWER, MORE)
    assert past.explain(turn, 8) is None
    assert past.explain(turn, 4) == Miss("evicted", 4, 0)


@pytest.mark.parametrize("session", [None, "s"])
def test_a_changing_first_line_is_content_changed_there(session: str | None) -> None:
    past = history()
    remember(past, chat([50, 7, 52, 53], ASKED, session=session), ANSWER)
    changed = chat([50, 8, 52, 53], ASKED, ANSWER, MORE, session=session)
    assert past.explain(changed, 1) == Miss("content_changed", 1, 0)


def test_another_question_behind_the_same_system_prompt_is_new() -> None:
    past = history()
    remember(past, chat(SYSTEM, ASKED), ANSWER)
    assert past.explain(chat(SYSTEM, [60, 66, 67]), 6) == Miss("cold", 6, 1)
    assert past.explain(chat(SYSTEM, [60, 66, 67], session="new"), 6) == Miss("cold", 6, 1)


def test_within_a_session_the_same_is_a_change() -> None:
    past = history()
    remember(past, chat(SYSTEM, ASKED, session="s"), ANSWER)
    assert past.explain(chat(SYSTEM, [60, 66, 67], session="s"), 6) == Miss("content_changed", 6, 1)


def test_an_answer_without_its_reasoning_says_so() -> None:
    for opened in ((), (76,)):  # by the answer itself, or by the prompt
        past = history()
        first = chat((1, 2, 3, 4), (5, 6, *opened))
        past.remember(first, [*first.tokens, 50, 51, 77, 1, 2, 3], 11 + len(opened))
        again = chat((1, 2, 3, 4), (5, 6), (1, 2, 3, 99), (9, 9))
        assert past.explain(again, 6) == Miss("reasoning_stripped", 6, 2)
        other = chat((1, 2, 3, 4), (5, 6), (8, 8, 8), (9, 9))
        assert past.explain(other, 6) == Miss("content_changed", 6, 2)


def test_an_answer_of_other_tokens_and_the_same_text_is_retokenised() -> None:
    past = history()
    remember(past, chat(SYSTEM, ASKED), ANSWER)
    assert past.explain(chat(SYSTEM, ASKED, [12, 3, 99], MORE), 8) == Miss("retokenised", 8, 2)
    assert past.explain(chat(SYSTEM, ASKED, [1, 23, 99], MORE), 9) == Miss("retokenised", 9, 2)


def test_an_edited_answer_is_content_changed() -> None:
    past = history()
    remember(past, chat(SYSTEM, ASKED), ANSWER)
    assert past.explain(chat(SYSTEM, ASKED, [1, 3, 99], MORE), 9) == Miss("content_changed", 9, 2)


def test_an_answer_of_an_earlier_turn_can_be_retokenised_too() -> None:
    past = history()
    first = chat(SYSTEM, ASKED)
    remember(past, first, ANSWER)
    remember(past, chat(SYSTEM, ASKED, ANSWER, MORE), [3, 3])
    assert len(past) == 1  # the second continues the first
    assert past.explain(chat(SYSTEM, ASKED, [123], MORE, [3, 3], MORE), 8) == Miss("retokenised", 8, 2)


def test_a_pause_leaves_nothing_behind() -> None:
    past = history()
    remember(past, chat(SYSTEM, ASKED, session="s"), [1])
    remember(past, chat(SYSTEM, ASKED, session="s"), ANSWER)
    assert (len(past), past.tokens) == (1, 11)
    assert past.explain(chat(SYSTEM, ASKED, [12, 3], MORE, session="s"), 8) == Miss("retokenised", 8, 2)


def test_sessions_that_go_the_same_way_are_both_remembered() -> None:
    past = history()
    remember(past, chat(SYSTEM, session="s"), [1])
    remember(past, chat(SYSTEM, session="t"), [1, 2])
    assert len(past) == 2
    for session in "st":
        assert past.explain(chat(SYSTEM, [9, 9], session=session), 5) == Miss("content_changed", 5, 1)


def test_without_spans_the_text_is_compared_to_the_end() -> None:
    past = history()
    past.remember(Request("r", (60, 61), SCOPE), (60, 61, 1, 2, 3), 4)
    assert past.explain(Request("r", (60, 61, 12, 3, 70), SCOPE), 2) == Miss("retokenised", 2)
    assert past.explain(Request("r", (60, 61, 3, 3, 70), SCOPE), 2) == Miss("cold", 2)


def test_the_same_prompt_under_another_scope() -> None:
    past = history()
    remember(past, chat(SYSTEM, ASKED), ANSWER)
    salted = chat(SYSTEM, ASKED, scope=Scope("m", salt="x"))
    assert past.explain(salted, 0) == Miss("scope_changed", 0, 0)
    remember(past, salted)
    assert past.explain(salted, 0) == Miss("evicted", 0, 0)
    assert past.explain(chat(ASKED, scope=Scope("m", salt="y")), 0) == Miss("cold", 0, 0)


def test_more_held_than_remembered_is_cold_from_there() -> None:
    past = history()
    remember(past, chat(SYSTEM, ASKED))
    other = chat(SYSTEM, [60, 90, 91, 92], MORE)
    assert past.explain(other, 8) == Miss("cold", 8, 1)
    assert history().explain(chat(SYSTEM, ASKED), 3) == Miss("cold", 3, 0)


def test_of_n_answers_the_one_that_was_taken_counts() -> None:
    past = history()
    asked = chat(SYSTEM, ASKED, session="s")
    remember(past, asked, [1, 2, 3])
    remember(past, asked, [1, 3, 3])
    remember(past, chat(SYSTEM, session="t"), [5])
    assert past.explain(chat(SYSTEM, ASKED, [1, 2, 3], MORE, session="s"), 10) is None
    assert past.explain(chat(SYSTEM, ASKED, [1, 3, 3], MORE, session="s"), 10) is None
    remember(past, chat(SYSTEM, ASKED, [1, 3, 3], MORE, session="s", name="r2"), [9])
    assert past.explain(chat(SYSTEM, ASKED, [1, 2, 3], MORE, session="s"), 9) == Miss("content_changed", 9, 2)


def test_the_same_sequence_again_is_remembered_once() -> None:
    past = history()
    for _ in range(3):
        remember(past, chat(SYSTEM, ASKED, session="s"), ANSWER)
    assert (len(past), past.tokens) == (1, 11)


def test_of_two_sessions_with_the_same_tokens_the_newer_is_remembered() -> None:
    past = history()
    for session in "st":
        remember(past, chat(SYSTEM, ASKED, session=session), ANSWER)
    assert (len(past), past.tokens, len(past._sessions)) == (1, 11, 1)


def test_memory_is_bounded_in_sequences_and_tokens() -> None:
    past = history(max_sequences=3)
    for first in range(5):
        remember(past, chat([first] * B, session=str(first)))
    assert len(past) == 3
    assert past.explain(chat([0] * B, session="0"), 0) == Miss("cold", 0, 0)
    assert past.explain(chat([4] * B, session="4"), 0) == Miss("evicted", 0, 0)
    past = history(max_tokens=10)
    for first in range(5):
        remember(past, chat([first] * B, session=str(first)))
    assert (len(past), past.tokens) == (2, 8)
    remember(past, chat([9] * 100))  # one sequence is remembered whatever its length
    assert (len(past), past.tokens) == (1, 100)


tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)


turns_of = st.lists(st.tuples(tokens, tokens, st.sampled_from([None, "s", "t"]), st.integers(0, 9)), max_size=12)


@given(turns_of, tokens, st.integers(0, 9))
def test_whatever_is_remembered_an_answer_is_well_formed(
    turns: list[tuple[list[int], list[int], str | None, int]], asked: list[int], matched: int
) -> None:
    past = history(max_sequences=4)
    for i, (prompt, answer, session, computed) in enumerate(turns):
        remember(past, chat(prompt, session=session, name=str(i)), answer, min(computed, len(prompt)))
        assert past.tokens == sum(map(len, past._past.values()))
        assert sum(past._firsts.values()) == sum(map(len, past._sorted.values())) == len(past) <= 4
        assert all(turn in past._past.values() for session in past._sessions.values() for turn in session)
    miss = past.explain(chat(asked, session="s"), min(matched, len(asked) - 1))
    assert miss is None or (0 <= miss.at_token < len(asked) and miss.message == 0)
