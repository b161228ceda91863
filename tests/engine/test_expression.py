"""Masks of expressions are kept by where an answer stands: the same are told, and they are those llguidance gives."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Hashable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.harness import model
from models.test_tokenizer import llama_fields
from tenure.engine import guided
from tenure.engine.expression import MAX_CHARS, MAX_DEPTH, MAX_TERMS, Place, read
from tenure.engine.guided import Guides, Known, Matcher, Words
from tenure.models import tokenizer
from tenure.models.tokenizer import Tokenizer
from tenure.types import Guide, Token

LIST = r"([A-Z][a-z]{2,9} [a-z]{2,9} [0-9]{1,4}[.] ){100,200}"


def ahead(expression: str, text: str, horizon: int = 20) -> Hashable:
    made = read(expression)
    assert made is not None, expression
    place = Place(made, horizon)
    for char in text:
        place.take(char.encode())
    return place.ahead()


def test_places_in_one_repetition_and_the_next_are_the_same() -> None:
    once, more = "Old paper 12. ", "New tin 3. "
    assert ahead(LIST, once + "Ol") == ahead(LIST, more * 60 + "Wo") is not None
    assert ahead(LIST, once + "Ol") != ahead(LIST, once + "Old")
    assert ahead(LIST, more * 150 + "Wo") != ahead(LIST, more * 199 + "Wo")
    # The token that sees farthest tells how many repetitions are as good as no end.
    assert ahead("[a-z]{3,40}", "a" * 10) == ahead("[a-z]{3,40}", "b" * 15)
    assert ahead("[a-z]{3,40}", "a" * 10, 40) != ahead("[a-z]{3,40}", "b" * 15, 40)
    assert ahead("[a-z]{3,40}", "a") != ahead("[a-z]{3,40}", "aa")
    assert ahead("(abc){0,2}", "", 4) != ahead("(abc){0,2}", "abc", 4), "a token may end in the second one"
    assert ahead("(a?){3}b", "b") is not None, "what may be empty need not come"


def test_a_character_that_is_not_whole_says_nothing() -> None:
    made = read("[à-ü]{9}日+")
    assert made is not None
    place = Place(made, 20)
    for byte in "é".encode():
        assert place.ahead() is not None
        place.take(bytes([byte]))
        if byte == 0xC3:
            assert place.ahead() is None
            place.take(b"\xa9")
            break
    assert place.ahead() == ahead("[à-ü]{9}日+", "ü")
    place.take(b"\xff")
    assert place.ahead() is None


UNREAD = [
    "(?i)a", "(?P<n>a)", "(?<n>a)", r"\x41", r"\p{L}", r"\bA", r"\Aa", "a*?", "a{2}{3}", "a++", "[a-c&&b]", "[a--b]",
    "[a~~b]", "[[:alpha:]]", "[]a]", "[^]a]", "[a-c-e]", "[--a]", "a{,3}", "a{ 2}", "a{2 }", "a{1, 2}", "^a|b", "a|b$",
    "(^a)", "(a$)", r"\u0041", r"\0", "[a", "(a", "a)", "a{2", "*a", "[z-a]", "a\\", "[\\", "a{1234567}",
    "(" * (MAX_DEPTH + 1) + "a" + ")" * (MAX_DEPTH + 1), "a" * (MAX_TERMS + 1), "|" * (MAX_CHARS + 1),
    "[" + "".join(chr(0x400 + 2 * i) for i in range(40)) + "]",
]  # fmt: skip


@pytest.mark.parametrize("text", UNREAD)
def test_what_is_not_covered_is_not_read(text: str) -> None:
    assert read(text) is None


def test_what_only_llguidance_knows_ends_what_is_said() -> None:
    assert ahead(r"\w+", "ab1_") is not None
    assert ahead(r"\w+", "é") is None
    assert ahead(r"[^\d]+", "é") is None
    assert ahead("[^a-c]+", "é") is not None
    assert ahead(".+", "é ") is not None
    assert ahead(".+", "\n") is None
    assert ahead("a+", "b") is None, "no way leads there"


def test_expressions_that_branch_without_end_are_left_to_llguidance() -> None:
    assert ahead("([a-z]+ ?){1,50}", "abcdefghijkl") is None, "too many ways"
    words = "|".join(f"x{a}{b}" for a, b in itertools.product("abcdefghijkl", repeat=2))
    assert ahead(f"({words})+", "xab") is None, "too many terms to look at for one character"


ATOMS = st.sampled_from(["a", "b", "ab", "[ab]", "[^a]", ".", r"\w", ""])
COUNTS = st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,2}", "{0,3}", "{2,}", "{3,9}", "{7,20}"])


def _grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    group = st.builds(
        lambda one, more, count: f"({'|'.join([one, *more])}){count}", inner, st.lists(inner, max_size=2), COUNTS
    )
    return st.builds("".join, st.lists(group, min_size=1, max_size=3))


EXPRESSIONS = st.recursive(st.builds(lambda a, n: f"({a}){n}" if a else "", ATOMS, COUNTS), _grow, max_leaves=6)


@settings(max_examples=150, deadline=None)
@given(EXPRESSIONS, st.lists(st.text("ab", max_size=9), min_size=8, max_size=8))
def test_from_equal_places_the_same_follows(expression: str, texts: list[str]) -> None:
    """Against Python's expressions: what goes on from equal places is matched by both or by neither."""
    horizon = 4
    judge = re.compile(expression)
    found: dict[Hashable, tuple[str, list[bool]]] = {}
    for text in texts:
        place = ahead(expression, text, horizon)
        if place is None:
            continue
        ends = ["".join(end) for length in range(horizon) for end in itertools.product("ab", repeat=length)]
        follows = [judge.fullmatch(text + end) is not None for end in ends]
        known, first = found.setdefault(place, (text, follows))
        assert follows == first, (expression, known, text)


GUIDES = [
    LIST,
    "^[a-z]{3,40}$",
    r"[A-Z][a-z]{2,8} is \d{1,3} years old\.",
    r"(\w{1,12}, ){2,30}end",
    r"(one|two|three){3,9}( [^,\n]{1,30},)?",
    "((ab?){2,4}|c){5}(  [a-z]| {3}x)*",
    "[à-ü日a-f ]{5,25}",
    r"(https://)?[a-z0-9-]{1,63}(\.[a-z]{2,6}){1,3}/?",
    "(the quick brown fox |[0-9]){2,}",
    r".{10,30}",
    r"[0-9a-f]{8}-[0-9a-f]{4}",
    "a{1,3}|[^a]{2,5}b*",
]


def bits(matcher: Matcher) -> NDArray[np.int32]:
    return guided.ask([matcher])[0].copy()


def allowed(mask: NDArray[np.int32]) -> NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def walks(guides: Guides, words: Tokenizer, eos: frozenset[Token], expression: str, count: int) -> int:
    """Answers of random tokens, each mask beside one of a matcher that keeps none; how many were kept ones."""
    guide = Guide("regex", expression)
    chance = random.Random(expression)
    hits = 0
    for walk in range(count):
        one, alone = guides.start(guide), guides.start(guide)
        alone._place = None
        for _ in range(40):
            place = None if one._place is None else one._place.ahead()
            hits += place is not None and guides._known.find((one._guide, place)) is not None
            mask = bits(one)
            assert np.array_equal(mask, bits(alone)), (expression, walk)
            ids = allowed(mask).tolist()
            token = chance.choice(ids)
            if walk % 2:  # long tokens too, of which there are few
                token = max(chance.sample(ids, min(8, len(ids))), key=lambda one: len(words.token_bytes(one)))
            if token in eos:
                break
            one.consume(token)
            alone.consume(token)
            assert one.error is alone.error is None
    return hits


@pytest.mark.parametrize("expression", GUIDES)
def test_kept_masks_are_those_of_llguidance(expression: str) -> None:
    loaded = model()
    guides = Guides(loaded.tokenizer, loaded.shape.vocab, loaded.eos_ids)
    assert walks(guides, loaded.tokenizer, loaded.eos_ids, expression, 8) > 0


@pytest.mark.parametrize("expression", ["(the )?hello world, [a-z ]{3,20}", "([a-z]{2,9} ){3,}", "[a-z]{1,9} {2,5}x"])
def test_sentencepiece_spells_what_must_come_without_a_space_before(expression: str) -> None:
    words = tokenizer.from_gguf(llama_fields())
    guides = Guides(words, words.vocab_size, words.eos_ids)
    assert walks(guides, words, words.eos_ids, expression, 8) > 0
    matcher = guides.start(Guide("regex", "hello"))
    said = b""
    while not (ids := set(allowed(bits(matcher)).tolist())) <= words.eos_ids:
        token = ids.pop()
        said += words.token_bytes(token)
        matcher.consume(token)
        assert matcher.error is None
    assert said == b"hello"


def test_answers_of_one_guide_share_masks_and_guides_do_not() -> None:
    loaded = model()
    guides = Guides(loaded.tokenizer, loaded.shape.vocab, loaded.eos_ids)
    first, second = (guides.start(Guide("regex", "[a-z]{3,9}")) for _ in range(2))
    other = guides.start(Guide("regex", "[0-9]{3,9}"))
    bits(first)
    assert len(guides._known) == 1
    second.matcher.consume_token(min(loaded.eos_ids))  # it cannot be asked any more
    assert np.array_equal(bits(second), bits(first))
    assert not np.array_equal(bits(other), bits(first))
    assert len(guides._known) == 2


def test_a_guide_whose_answer_failed_is_compiled_anew() -> None:
    """Copies share llguidance's lexer: one answer that uses it up must not fail all that are asked for later."""
    loaded = model()
    guides = Guides(loaded.tokenizer, loaded.shape.vocab, loaded.eos_ids)
    guide = Guide("regex", r"([^\n](.|日| [a-z]){0,2}){10,200}é\.")
    chance, first, beside = random.Random(0), guides.start(guide), guides.start(guide)
    for _ in range(200):
        ids = allowed(bits(first)).tolist()
        if first.error is not None:
            break
        first.consume(chance.choice(ids))
    assert "too many expressions" in str(first.error)
    beside._place = None
    bits(beside)
    assert beside.error is not None, "what began before shares what is used up"
    later = guides.start(guide)
    later._place = None
    assert len(allowed(bits(later))) > 1
    assert later.error is None
    failed = guides._compiled[guide]
    beside._failed()
    assert guides._compiled[guide] is failed, "one that was compiled since stays"


def test_masks_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sends one expression after another pushes masks out, the least used first."""
    loaded = model()
    size = 4 * -(-loaded.shape.vocab // 32)
    monkeypatch.setattr(guided, "KEPT_BYTES", 10 * (size + guided._KEY_BYTES))
    guides = Guides(loaded.tokenizer, loaded.shape.vocab, loaded.eos_ids)

    def found(one: Matcher) -> NDArray[np.int32] | None:
        assert one._place is not None
        return guides._known.find((one._guide, one._place.ahead()))

    used = guides.start(Guide("regex", "[a-z]{3,9}"))
    bits(used)
    first = found(used)
    assert first is not None and first.base is None, "a row would keep those of all answers of its step"
    for i in range(150):
        new = guides.start(Guide("regex", f"[a-z]{{3,{10 + i}}}"))
        bits(new)
        bits(used)
        assert len(guides._known) <= 10
        assert len(guides._compiled) <= guided._KEPT
    assert found(used) is first and found(new) is not None


def test_what_one_text_must_follow_is_not_kept() -> None:
    loaded = model()
    known = Known(Words.of(loaded.tokenizer, loaded.shape.vocab))

    def keeps(*texts: str) -> bool:
        mask = np.zeros(-(-loaded.shape.vocab // 32), np.int32)
        for text in texts:
            (token,) = loaded.tokenizer.encode(text)
            mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        known.keep(texts, mask)
        return known.find(texts) is not None

    assert keeps("a", "b")
    assert keeps(" a", " b"), "a space must come, what follows it is free"
    assert not keeps(" a")
    assert not keeps(" an", " and"), "more than one byte must come"
    assert not keeps("<|im_end|>"), "an end is no text"
