"""The tokenizers of the families from GGUF metadata: ids equal transformers' on a thousand strings each.

No real vocabulary but SmolLM2's is at hand without the network, so each is a small one trained here; the oracle is
transformers' own class for the family, its converter's pattern, or what the published tokenizer.json describes.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.models.test_tokenizer import DIGITS, TEXTS
from tokenizers import AddedToken, Regex, decoders, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from tokenizers import models as backends
from transformers import GemmaTokenizer, GPT2Tokenizer, LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.tokenization_utils_base import generate_merges

from tenure.models import tokenizer
from tenure.models.fields import Fields

MORE = [
    "Le cœur déçu mais l'âme plutôt naïve, Louÿs rêva de crapaüter", "Zażółć gęślą jaźń", "Příliš žluťoučký kůň",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία", "Съешь же ещё этих мягких французских булок", "いろはにほへと ちりぬるを",
    "天地玄黃 宇宙洪荒", "키스의 고유조건은 입술끼리", "नमस्ते दुनिया", "สวัสดีชาวโลก", "שלום עולם", "مرحبا بالعالم",
    "for (int i = 0; i < n; ++i) { sum += a[i]; }", "SELECT * FROM t WHERE x >= 10;",
    "fn main() { println!(\"{}\", 42); }",
    "#include <vector>\n\n\tstd::vector<int> v;\n", "{\"a\": [1, 2.5, null], \"b\": \"\\u00e9\"}",
    "e\u0301 o\u0308 \u1112\u1161\u11ab",
    "I'LL we'Ve don'T", "camelCaseWordsAndHTMLParser", "...!!??", "—–‘’“”", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "🏳️‍🌈🫠🧑🏿‍🚀",
    "    ", "\n\n\n", "\t\t", "\r\n", " \n ", "0", "12345678", "3.14e-10",
]  # fmt: skip
POOL = TEXTS[3:11] + DIGITS + MORE


@functools.cache
def strings() -> list[str]:
    """A thousand: whole lines, cut and glued at random, and single characters from all over Unicode."""
    rng = random.Random(11)
    made = [*TEXTS, *POOL]
    while len(made) < 1000:
        parts = []
        for _ in range(rng.randint(1, 5)):
            line = rng.choice(POOL)
            start = rng.randrange(len(line))
            parts.append(line[start : start + rng.randint(1, 30)])
            if rng.random() < 0.3:
                parts.append(chr(rng.choice([rng.randrange(32, 0xD800), rng.randrange(0x1F300, 0x1FAFF)])))
        made.append("".join(parts))
    return made


def byte_level(patterns: list[Any]) -> Backend:
    backend = Backend(backends.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*patterns, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def cut(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


@functools.cache
def trained(single_digits: bool) -> tuple[dict[str, int], tuple[tuple[str, str], ...]]:
    """Vocabulary and merges of a byte-level BPE over all the texts, merged across as much as any family allows."""
    digits = [pre_tokenizers.Digits(individual_digits=True)] if single_digits else []
    backend = byte_level([*digits, cut(r" ?\S+|\s+")])
    trainer = trainers.BpeTrainer(
        vocab_size=2500, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(strings() * 3, trainer)
    state = json.loads(backend.to_str())["model"]
    return state["vocab"], tuple((left, right) for left, right in state["merges"])


def published(patterns: list[Any]) -> Callable[[dict[str, int], list[tuple[str, str]]], Any]:
    """A tokenizer as its tokenizer.json describes it, for families whose class transformers does not have."""

    def build(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Any:
        backend = byte_level(patterns)
        backend.model = backends.BPE(vocab=vocab, merges=merges)
        backend.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
        return PreTrainedTokenizerFast(tokenizer_object=backend)

    return build


TIKTOKEN = TikTokenConverter(vocab_file="none").pattern
DIGITS_FIRST = [
    pre_tokenizers.Digits(individual_digits=True),
    cut(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
]
BPE: dict[str, Callable[..., Any]] = {
    "qwen2": lambda vocab, merges: Qwen2Tokenizer(vocab=vocab, merges=merges),
    "gpt-2": lambda vocab, merges: GPT2Tokenizer(vocab=vocab, merges=merges),
    "olmo": lambda vocab, merges: GPT2Tokenizer(vocab=vocab, merges=merges),
    "dbrx": published([cut(TIKTOKEN)]),
    "smaug-bpe": published([cut(TIKTOKEN)]),
    "smollm": published(DIGITS_FIRST),
    "refact": published(DIGITS_FIRST),
}  # fmt: skip


@pytest.mark.parametrize("pre", BPE)
def test_bpe(pre: str) -> None:
    vocab, merges = trained(pre in ("smollm", "refact"))
    theirs = BPE[pre](dict(vocab), list(merges))
    tokens = sorted(vocab, key=vocab.__getitem__)
    ours = tokenizer.from_gguf(
        Fields(
            "m.gguf",
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": pre,
                "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.token_type": [3 if t == "<|endoftext|>" else 1 for t in tokens],
                "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
            },
        )
    )
    check(ours, theirs)


def check(ours: Any, theirs: Any) -> None:
    lengths = 0
    for text in strings():
        want = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == want, repr(text)
        lengths += len(want)
    assert lengths > 5000


def pieces(control: list[str]) -> tuple[list[str], list[float], list[int]]:
    """A SentencePiece BPE vocabulary: control tokens, bytes, then what merging the texts gives, best first."""
    backend = Backend(backends.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", "never", split=True)
    backend.train_from_iterator(strings() * 3, trainers.BpeTrainer(vocab_size=1500, show_progress=False))
    vocab = backend.get_vocab()
    learned = [t for t in sorted(vocab, key=vocab.__getitem__) if len(t) > 1]
    single = [t for t in sorted(vocab) if len(t) == 1 and ord(t) < 0x3000]
    tokens = [*control, *[f"<0x{value:02X}>" for value in range(256)], *learned, *single]
    scores = [*[0.0] * (len(control) + 256), *[-float(i) for i in range(len(learned))], *[-1e4] * len(single)]
    types = [3 if t != "<unk>" else 2 for t in control] + [6] * 256 + [1] * (len(learned) + len(single))
    return tokens, scores, types


def sentencepiece(control: list[str], **keys: Any) -> tuple[Any, dict[str, int], list[tuple[str, str]]]:
    tokens, scores, types = pieces(control)
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.unknown_token_id": control.index("<unk>"),
    }
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = generate_merges(vocab, dict(zip(tokens, scores, strict=True)))
    return tokenizer.from_gguf(Fields("m.gguf", fields | keys)), vocab, merges


def test_gemma() -> None:
    ours, vocab, merges = sentencepiece(
        ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"], **{"tokenizer.ggml.add_space_prefix": False}
    )
    check(ours, GemmaTokenizer(vocab=vocab, merges=merges))


def test_phi3() -> None:
    """As Llama 2's, but control tokens swallow the white space after them."""
    ends = ["<|assistant|>", "<|end|>", "<|user|>"]
    ours, vocab, merges = sentencepiece(
        ["<unk>", "<s>", "</s>", "<|endoftext|>", *ends], **{"general.architecture": "phi3"}
    )
    theirs = LlamaTokenizer(vocab=vocab, merges=merges, legacy=False)
    theirs.add_tokens([AddedToken("<|endoftext|>", normalized=False, special=True)])
    theirs.add_tokens([AddedToken(token, rstrip=True, normalized=False, special=True) for token in ends])
    check(ours, theirs)
    end, text = vocab["<|end|>"], ours.encode("a<|end|>\n b")
    assert text == theirs.encode("a<|end|>\n b", add_special_tokens=False)
    assert text.index(end) < len(text) - 1
    assert ours.encode("<|user|>\n\n") == [vocab["<|user|>"]]
