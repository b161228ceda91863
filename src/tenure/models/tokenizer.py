"""Text to token ids and back: the `tokenizers` library for the way in, a table of bytes per token for the way out.

Decoding by table makes a stream and the whole the same function: both put a token's bytes into one incremental UTF-8
decoder, so the pieces of a stream always add up to the decoded whole. A character that is cut off, or bytes that are
no UTF-8, become U+FFFD, once per broken sequence.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tenure.errors import BrokenFile, InvalidRequest, ModelNotFound, UnsupportedModel
from tenure.models.answers import SHOWN
from tenure.models.fields import Fields

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _SHORT
    + r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _SHORT
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip
_SMOLLM = (r"\p{N}", _GPT2)
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "olmo": (_GPT2,),
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "llama-bpe": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "dbrx": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "gpt-4o": (_GPT4O,),
    "tekken": (_TEKKEN,),
}
"""GGUF's tokenizer.ggml.pre → the patterns that cut text before merging, one after the other."""
_WHOLE_WORDS_FIRST = frozenset({"llama3", "llama-v3", "llama-bpe", "tekken"})
"""Vocabularies in which a word that is a token stays one, whatever its merges say."""
_COMPOSED_FIRST = frozenset({"qwen2"})
"""Vocabularies whose text is normalised to NFC, as their tokenizer.json says and GGUF does not."""
_KEEP_SPACE = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Phi-3's control tokens that do not swallow the white space after them, as all its others do."""
_END_OF_TURN = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<end_of_turn>"})
"""Control tokens that end an answer even in files that name only one of them."""

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "▁"


class TextDecoder:
    """Turns the tokens of one stream into text as they come; only whole characters are let out."""

    def __init__(self, table: Sequence[bytes], strip: bool) -> None:
        self._table = table
        self._strip = strip
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token: int) -> str:
        """The text that `token` completes, maybe empty."""
        text = self._decode(self._table[token])
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def finish(self) -> str:
        """What is left at the end: U+FFFD when a character was cut off, else nothing."""
        return self._decode(b"", True)


class Tokenizer:
    """The tokenizer of a model. Threads may share it."""

    def __init__(
        self,
        backend: Backend,
        *,
        size: int = 0,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        add_bos: bool = False,
        unknown_id: int | None = None,
    ) -> None:
        """`size`: ids the model has, when more than the tokenizer knows (the rest decode to nothing)."""
        self._backend = backend
        self._spaced = _is_sentencepiece(backend)
        self._strips = self._spaced and _strips_first_space(backend)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(size, max(vocab.values(), default=-1) + 1)
        self._bytes = _byte_table(vocab, {i: t.content for i, t in added.items()}, self.vocab_size, self._spaced)
        self._text_bytes = list(self._bytes)
        self._marked_bytes = self._text_bytes
        for i in self.special_ids:
            self._text_bytes[i] = b""
        shown = [i for i in self.special_ids if self._bytes[i].decode() in SHOWN]
        if shown:
            self._marked_bytes = list(self._text_bytes)
            for i in shown:
                self._marked_bytes[i] = self._bytes[i]
        if self._spaced and unknown_id is not None:
            self._text_bytes[unknown_id] = b""
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)
        self.add_bos = add_bos
        """Whether the model expects bos before a plain prompt (chat templates write their own)."""

    def encode(self, text: str, *, special: bool = True, add_bos: bool = False) -> list[int]:
        """Token ids of `text`. `special`: control tokens spelled out in the text become those tokens."""
        ids = self._backend.encode(text, add_special_tokens=False).ids if special else self._encode_plain(text)
        if add_bos and self.bos_id is not None:
            return [self.bos_id, *ids]
        return list(ids)

    def encode_with_ends(self, text: str, *, inside: bool = False) -> tuple[list[int], list[int]]:
        """Token ids, and for each the character of `text` at which it ends (ascending).

        `inside`: the text goes on after other tokens, so nothing is put before its first word.
        """
        lead = self._lead() if inside and text else ""
        encoding = self._backend.encode(lead + text, add_special_tokens=False)
        ids, offsets = encoding.ids, encoding.offsets
        ends: list[int] = []
        at = 0
        for _, end in offsets:
            at = max(at, end - len(lead))
            ends.append(at)
        skip = 1 if lead else 0
        return ids[skip:], ends[skip:]

    def decode(
        self, ids: Iterable[int], *, skip_special: bool = True, continues: bool = False, marks: bool = False
    ) -> str:
        """The text of `ids`. `continues`: they follow other text, so a leading space stays; `marks`: see `stream`.

        InvalidRequest when an id is not in the vocabulary.
        """
        table = self._marked_bytes if marks else self._text_bytes if skip_special else self._bytes
        ids = list(ids)
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise InvalidRequest(f"token id {token} is not in 0..{self.vocab_size - 1}", param="tokens")
        text = b"".join([table[token] for token in ids]).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._strips and not continues else text

    def stream(self, *, continues: bool = False, marks: bool = False) -> TextDecoder:
        """A decoder for one stream: its pieces add up to `decode(ids)`. `marks`: those of calls and reasoning are shown
        even where they are control tokens."""
        return TextDecoder(self._marked_bytes if marks else self._text_bytes, self._strips and not continues)

    def token_text(self, token: int) -> str:
        """The text of one token, control tokens by name; U+FFFD for parts of characters."""
        return self._bytes[token].decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, control tokens by name."""
        return self._bytes[token]

    def _lead(self) -> str:
        """A control token to put before a text that is not the beginning, when beginnings are spelled differently."""
        if not self._spaced or self.bos_id not in self.special_ids:
            return ""
        return self._backend.id_to_token(self.bos_id) or ""

    def _encode_plain(self, text: str) -> list[int]:
        """As `encode`, but nothing in the text is a control token."""
        backend = self._backend
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        pieces = [(text, None)] if backend.pre_tokenizer is None else backend.pre_tokenizer.pre_tokenize_str(text)
        return [token.id for piece, _ in pieces for token in backend.model.tokenize(piece)]


def from_file(path: Path, size: int = 0) -> Backend:
    """The backend described by a tokenizer.json. Raises ModelNotFound, BrokenFile, UnsupportedModel."""
    if not path.is_file():
        raise ModelNotFound(
            f"{path}: no such file; Tenure needs tokenizer.json (a directory with only tokenizer.model must be "
            "converted first: AutoTokenizer.from_pretrained(dir).save_pretrained(dir))"
        )
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise BrokenFile(f"{path}: broken tokenizer: {error}") from error
    kind = type(backend.decoder).__name__ if backend.decoder is not None else "none"
    steps = _decoder_steps(backend)
    if not {"ByteLevel", "ByteFallback", "Metaspace"} & set(steps):
        raise UnsupportedModel(
            f"{path}: a tokenizer with decoder {kind} is not supported; supported: byte-level BPE, SentencePiece"
        )
    top = max(backend.get_vocab(with_added_tokens=True).values(), default=0)
    if size and top >= size:
        raise BrokenFile(f"{path}: it has the token id {top}, but the model knows only ids below {size}")
    return backend


def from_gguf(fields: Fields, size: int = 0) -> Tokenizer:
    """The tokenizer in a GGUF header. Raises UnsupportedModel for other kinds than gpt2 and llama, BrokenFile."""
    kind = fields.text("tokenizer.ggml.model")
    tokens: list[str] = fields.items("tokenizer.ggml.tokens", str)
    types: list[int] = [_NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in fields:
        types = fields.items("tokenizer.ggml.token_type", int, len(tokens))
    if kind == "gpt2":
        backend = _byte_level(fields, tokens)
    elif kind == "llama":
        backend = _sentencepiece(fields, tokens)
    else:
        raise UnsupportedModel(f"{fields.where}: tokenizer.ggml.model {kind} is not supported; supported: gpt2, llama")
    control = [t for t, k in zip(tokens, types, strict=True) if k == _CONTROL]
    swallows = kind == "llama" and fields.raw("general.architecture") == "phi3"
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False, rstrip=swallows and t not in _KEEP_SPACE) for t in control]
    )
    user = [t for t, k in zip(tokens, types, strict=True) if k == _USER]
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in user])
    top = len(tokens) - 1
    if size and top >= size:
        raise BrokenFile(f"{fields.where}: {len(tokens)} tokens, but the model knows only {size}")
    eos = {
        fields.integer(f"tokenizer.ggml.{name}_token_id", 0, top)
        for name in ("eos", "eot", "eom")
        if f"tokenizer.ggml.{name}_token_id" in fields
    }
    eos |= {i for i, k in enumerate(types) if k == _CONTROL and tokens[i] in _END_OF_TURN}
    has_bos = "tokenizer.ggml.bos_token_id" in fields
    defaults_to_bos = kind == "llama" or fields.text("tokenizer.ggml.pre", "default") in _WHOLE_WORDS_FIRST
    return Tokenizer(
        backend,
        size=size,
        bos_id=fields.integer("tokenizer.ggml.bos_token_id", 0, top) if has_bos else None,
        eos_ids=eos,
        add_bos=has_bos and fields.flag("tokenizer.ggml.add_bos_token", defaults_to_bos),
    )


def _byte_level(fields: Fields, tokens: list[str]) -> Backend:
    name = fields.text("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise UnsupportedModel(f"{fields.where}: tokenizer.ggml.pre {name} is not supported; supported: {known}")
    backend = _bpe(fields.where, _vocab(fields, tokens), _merges(fields), ignore_merges=name in _WHOLE_WORDS_FIRST)
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[name]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if name in _COMPOSED_FIRST:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(fields: Fields, tokens: list[str]) -> Backend:
    """SentencePiece BPE: two neighbours merge when their union is a token, the best score first."""
    vocab = _vocab(fields, tokens)
    if "tokenizer.ggml.merges" in fields:
        merges = _merges(fields)
    else:
        scores: list[float] = fields.items("tokenizer.ggml.scores", float, len(tokens))
        merges = _merges_from_scores(tokens, vocab, scores)
    unknown = fields.integer("tokenizer.ggml.unknown_token_id", 0, len(tokens) - 1, 0)
    backend = _bpe(fields.where, vocab, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    prefix = fields.flag("tokenizer.ggml.add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, "first" if prefix else "never", split=False)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges(fields: Fields) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for merge in fields.items("tokenizer.ggml.merges", str):
        left, space, right = merge.partition(" ")
        if not space:
            raise BrokenFile(f"{fields.where}: the merge {merge!r} is not a pair")
        merges.append((left, right))
    return merges


def _merges_from_scores(tokens: list[str], vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to split a token into two tokens, ordered by the score of the token, then by the ids of its halves."""
    ranked: list[tuple[float, int, int]] = []
    get = vocab.get
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left = get(token[:cut])
            if left is not None:
                right = get(token[cut:])
                if right is not None:
                    ranked.append((-score, left, right))
    ranked.sort(key=lambda merge: merge[0])
    return [(tokens[left], tokens[right]) for _, left, right in ranked]


def _vocab(fields: Fields, tokens: list[str]) -> dict[str, int]:
    if not tokens:
        raise BrokenFile(f"{fields.where}: tokenizer.ggml.tokens is empty")
    return {token: i for i, token in enumerate(tokens)}


def _bpe(where: str, vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Backend:
    try:
        return Backend(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # the library raises nothing more precise
        raise BrokenFile(f"{where}: the vocabulary and its merges do not fit: {error}") from error


def _decoder_steps(backend: Backend) -> list[str]:
    """The kinds of the decoder's steps, e.g. [Replace, ByteFallback, Fuse, Strip]."""
    return [step["type"] for step in _decoder_state(backend)]


def _decoder_state(backend: Backend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = state.get("decoders", [state])
    return steps


def _is_sentencepiece(backend: Backend) -> bool:
    return "ByteLevel" not in _decoder_steps(backend)


def _strips_first_space(backend: Backend) -> bool:
    steps = _decoder_state(backend)
    return any(s["type"] == "Strip" or (s["type"] == "Metaspace" and s.get("prepend_scheme") != "never") for s in steps)


def _byte_table(vocab: dict[str, int], added: dict[int, str], size: int, spaced: bool) -> list[bytes]:
    """The bytes of every id; ids without a token have none."""
    table = [b""] * size
    if spaced:
        for token, i in vocab.items():
            table[i] = token.replace(_SPACE, " ").encode()
        for value in range(256):
            byte = vocab.get(f"<0x{value:02X}>")
            if byte is not None:
                table[byte] = bytes([value])
    else:
        alphabet = _byte_alphabet()
        for token, i in vocab.items():
            try:
                table[i] = token.translate(alphabet).encode("latin-1")
            except UnicodeEncodeError:
                table[i] = token.encode()
    for i, content in added.items():
        table[i] = content.encode()
    return table


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's spelling of bytes as printable characters, backwards; what spells no byte becomes unencodable."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    table = dict.fromkeys(others, 0x10FFFF)
    table |= {0x100 + n: b for n, b in enumerate(others)}
    return table
