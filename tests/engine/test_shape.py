"""What shapes an answer: penalties, bias, guides, logprobs; and that neither neighbours nor a pause change it."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.harness import english, model, text_of, watched
from tenure.engine.guided import Guides
from tenure.engine.guided import ask as ask_all
from tenure.engine.sampler import Sampler
from tenure.engine.shape import Shape, Shapes, likeliest, logprob
from tenure.errors import InvalidRequest
from tenure.types import Guide, Rows, Sampling

V = 1000


def row(seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 4, V).astype(np.float32)


def shaped(
    prompt: list[int], answer: list[int], eos: frozenset[int] = frozenset(), **fields: object
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Raw logits, and the same after an answer's shape had its way."""
    shape = Shape(prompt, Sampling(**fields), eos)  # type: ignore[arg-type]
    for token in answer:
        shape.took(token)
    raw = row()
    out = raw.copy()
    shape.apply(out)
    return raw, out


def test_penalties_are_those_of_vllm() -> None:
    prompt, answer = [1, 2, 3, 3], [3, 4, 4, 900]
    raw, out = shaped(
        prompt, answer, repetition_penalty=1.5, presence_penalty=0.25, frequency_penalty=0.5, logit_bias=((4, 2.0),)
    )
    expected = raw.astype(np.float64)
    expected[4] += 2.0
    for token in {*prompt, *answer}:
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    for token in set(answer):
        expected[token] -= 0.5 * answer.count(token) + 0.25
    assert np.allclose(out, expected, rtol=1e-6, atol=1e-6)
    untouched = [i for i in range(V) if i not in {*prompt, *answer}]
    assert np.array_equal(out[untouched], raw[untouched])


def test_many_tokens_are_counted() -> None:
    answer = [i % 700 for i in range(2000)]
    raw, out = shaped([], answer, frequency_penalty=0.125)
    counts = np.bincount(answer, minlength=V)
    assert np.allclose(out, raw - 0.125 * counts, atol=1e-5)


def test_ends_wait_for_min_tokens() -> None:
    for taken, banned in ((0, True), (2, True), (3, False)):
        _, out = shaped([1], [7] * taken, frozenset({5}), min_tokens=3, stop_token_ids=(6,))
        assert (out[[5, 6]] == -np.inf).all() == banned


def test_the_likeliest_come_first_and_ties_by_their_ids() -> None:
    values = row()
    values[[10, 400, 999]] = values.max() + 1
    order = sorted(range(V), key=lambda i: (-values[i], i))
    for count in (0, 1, 3, 20, V):
        assert likeliest(values, count) == order[:count]
    assert likeliest(values[:50], 5) == sorted(range(50), key=lambda i: (-values[i], i))[:5]


def test_logprobs_are_a_log_softmax() -> None:
    values = row()
    wide = values.astype(np.float64)
    norm = math.log(np.exp(wide - wide.max()).sum()) + wide.max()
    told = logprob(values, 17, 5, whole=True)
    assert told.logprob == pytest.approx(wide[17] - norm, abs=1e-5)
    assert [p for _, p in told.top] == pytest.approx(sorted(wide - norm, reverse=True)[:5], abs=1e-5)
    assert np.array_equal(np.frombuffer(told.logits or b"", np.float32), values)


def test_plain_answers_cost_nothing() -> None:
    shapes = Shapes(ask_all)
    assert shapes.took([], []) == {}
    assert not Sampling(temperature=0.5, top_p=0.9, top_k=4, stop=("x",)).shapes
    assert not Sampling().tells


SHAPING = [
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "logprobs": 3},
    {"temperature": 0.9, "min_p": 0.05, "seed": 7, "logit_bias": ((11, 3.0), (12, -100.0)), "min_tokens": 4},
    {"guide": Guide("regex", "[a-z ]{600}"), "temperature": 0.8, "seed": 3, "ignore_eos": False},
]


@pytest.mark.parametrize("fields", SHAPING, ids=["penalties", "sampled", "guided"])
def test_shaped_answers_are_the_same_alone_beside_others_cached_and_preempted(fields: dict[str, object]) -> None:
    loaded = model()
    prompts = [english(70), english(70, 100)]
    with watched(loaded, 40) as alone:
        first, again, other = (alone.ask(prompt, 90, **fields) for prompt in (prompts[0], *prompts))
        for ask in (first, again, other):
            alone.run(ask)
        expected = [alone.trace(first), alone.trace(other)]
        assert alone.trace(again) == expected[0]
    with watched(loaded, 9) as busy:  # two start with four blocks each, and each needs five
        asks = [busy.ask(prompt, 90, **fields) for prompt in prompts]
        done = busy.run(*asks)
        assert [busy.trace(ask) for ask in asks] == expected
        assert sum(one.receipt.preempted for one in done) > 0


def test_logprobs_reach_the_pieces_token_by_token() -> None:
    with watched(model()) as engine:
        ask = engine.ask(english(20), 12, logprobs=2, logits=True, n=2, temperature=1.0, seed=5)
        pieces, done = engine.engine.submit(ask).result()
        plain = engine.ask(english(20), 12, n=2, temperature=1.0, seed=5)
        bare, _ = engine.engine.submit(plain).result()
    assert all(not piece.logprobs for piece in bare)
    for index in range(2):
        mine = [piece for piece in pieces if piece.index == index]
        tokens = [token for piece in mine for token in piece.tokens]
        told = [entry for piece in mine for entry in piece.logprobs]
        assert [entry.token for entry in told] == tokens == [t for p in bare if p.index == index for t in p.tokens]
        assert all(len(piece.tokens) == len(piece.logprobs) for piece in mine)
        assert all(len(entry.top) == 2 and entry.top[0][1] >= entry.logprob - 1e-9 for entry in told)
        assert all(len(entry.logits or b"") == 4 * model().shape.vocab for entry in told)
    assert done.usage.completion_tokens == 24


@pytest.mark.parametrize(
    ("guide", "check"),
    [
        (Guide("regex", r"[A-Z][a-z]{2,8} is \d{1,3} years old\."), r"[A-Z][a-z]{2,8} is \d{1,3} years old\."),
        (Guide("choice", json.dumps(["yes", 'no "never"', "vielleicht für immer", "a\nb"])), None),
        (Guide("grammar", 'start: "(" ("+" | "-") DIGIT ")"\nDIGIT: /[0-9]+/'), r"\([+-][0-9]+\)"),
        (Guide("grammar", 'root ::= "x" [0-9] "y"'), r"x[0-9]y"),
    ],
)
def test_guides_hold(guide: Guide, check: str | None) -> None:
    with watched(model()) as engine:
        asks = [
            engine.ask(english(12 + i), 40, guide=guide, temperature=1.0, seed=i, ignore_eos=False) for i in range(6)
        ]
        handles = [engine.engine.submit(ask) for ask in asks]
        texts = [text_of(handle.result()[0]) for handle in handles]
    for text in texts:
        if check is None:
            assert text in ["yes", 'no "never"', "vielleicht für immer", "a\nb"]
        else:
            assert re.fullmatch(check, text)


CYCLIC = [
    Guide("json_schema", '{"$ref": "#"}'),
    Guide("json_schema", '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'),
    Guide("grammar", "start: start"),
    Guide("grammar", "root ::= root"),
]
IMPOSSIBLE = [
    Guide("json_schema", "false"),
    Guide("json_schema", '{"type": "integer", "minimum": 5, "maximum": 1}'),
    Guide("json_schema", '{"type": "string", "pattern": "("}'),
    Guide("json_schema", '{"type": "object", "uniqueItems": true, "not": {}}'),
    Guide("json_schema", "{"),
    Guide("json_schema", '{"properties": {"a": ' * 2000 + "{}" + "}}" * 2000),
    Guide("json_schema", '{"$ref": "#/nowhere"}'),
    *CYCLIC,
    Guide("json_schema", '{"description": "' + "x" * (1 << 18) + '"}'),
    Guide("regex", "["),
    Guide("regex", r"[^\x00-\U0010ffff]"),
    Guide("grammar", 'start: "a" | nothing'),
    Guide("grammar", "what is this"),
    Guide("choice", "[]"),
]


def test_impossible_guides_are_refused_before_the_engine_sees_them() -> None:
    with watched(model()) as engine:
        for guide in IMPOSSIBLE:
            with pytest.raises(InvalidRequest) as refused:
                engine.engine.check_guide(guide)
            assert 3 < len(str(refused.value)) < 1000
            with pytest.raises(InvalidRequest):
                engine.engine.submit(engine.ask([1], guide=guide, ignore_eos=False))
        assert engine.engine.stats().steps == 0


@pytest.mark.parametrize("guide", CYCLIC, ids=lambda guide: guide.text)
def test_what_leads_back_to_itself_is_said_to_and_what_would_be_right(guide: Guide) -> None:
    loaded = model()
    guides = Guides(loaded.tokenizer, loaded.shape.vocab, loaded.eos_ids)
    with pytest.raises(InvalidRequest) as refused:
        guides.check(guide)
    wrong, right = ("refers back to itself", "at least one finite value")
    if guide.kind == "grammar":
        wrong, right = ("a rule needs itself", "at least one finite text")
    assert wrong in refused.value.message and right in refused.value.message


def test_contradictions_are_refused() -> None:
    guide = Guide("regex", "a")
    with watched(model()) as engine:
        for fields in (
            {"guide": guide}, {"guide": guide, "ignore_eos": False, "min_tokens": 2}, {"logit_bias": ((10**9, 1.0),)},
            {"logit_bias": ((-1, 1.0),)}, {"repetition_penalty": 0.0}, {"min_p": 1.5},
        ):  # fmt: skip
            with pytest.raises(InvalidRequest):
                engine.engine.submit(engine.ask([1], **fields))


def test_masks_are_the_same_one_by_one_and_all_at_once() -> None:
    loaded = model()
    guides = Guides(loaded.tokenizer, loaded.shape.vocab, loaded.eos_ids)
    matchers = [guides.start(Guide("regex", f"[0-9]{{{n}}}[a-z]+")) for n in (1, 2, 3)]
    one_by_one = [ask_all([matcher])[0] for matcher in matchers]
    together = ask_all(matchers)
    assert together.shape == (3, -(-loaded.shape.vocab // 32))
    may = loaded.tokenizer.encode("7")[0]
    for bits, alone in zip(together, one_by_one, strict=True):
        assert np.array_equal(bits, alone)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
        assert may in allowed
        assert all(loaded.tokenizer.token_bytes(token).isdigit() for token in allowed)


def sampled(request: str, seq: int) -> Rows:
    return Rows(seq, request, 0, 0, [1], ((0,),), sample=True, counter=0, sampling=Sampling())


def test_only_guided_rows_have_masks() -> None:
    loaded = model()
    guides = Guides(loaded.tokenizer, loaded.shape.vocab, loaded.eos_ids)
    shapes = Shapes(ask_all)
    for name, guide in (("digits", Guide("regex", "[0-9]+")), ("words", Guide("regex", "[a-z]+")), ("biased", None)):
        guided = None if guide is None else guides.start(guide)
        shapes.add(name, [Shape([1], Sampling(guide=guide, logit_bias=((3, 1.0),)), frozenset(), guided)])
    rows = [sampled(name, seq) for seq, name in enumerate(["plain", "words", "biased", "digits"])]
    logits = np.zeros((4, loaded.shape.vocab), np.float32)
    masks = shapes.apply(logits, rows)
    assert masks is not None and masks.of.tolist() == [-1, 0, -1, 1]
    assert logits[:, 3].tolist() == [0.0, 1.0, 1.0, 1.0]
    tokens = Sampler(1).sample(logits, rows, masks)
    assert loaded.tokenizer.token_bytes(tokens[1]).isalpha() and loaded.tokenizer.token_bytes(tokens[3]).isdigit()
    assert tokens[0] == 0 and tokens[2] == 3
    assert shapes.apply(logits[:1], rows[:1]) is None


def test_a_guide_that_gives_up_fails_its_request_alone() -> None:
    loaded = model()
    guides = Guides(loaded.tokenizer, loaded.shape.vocab, loaded.eos_ids)
    matcher = guides.start(Guide("regex", "[0-9]{3}"))
    assert matcher.error is None
    matcher.consume(loaded.tokenizer.encode("hello")[0])
    assert matcher.error is not None
    shape = Shape([1], Sampling(guide=Guide("regex", "x")), frozenset(), matcher)
    ask_all([matcher])
    values = np.zeros(loaded.shape.vocab, np.float32)
    shape.apply(values)
    assert np.isnan(values).all()
    assert "guide" in (shape.failure or "")
