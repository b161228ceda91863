"""Traces in all their forms, and what is wrong with broken ones."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tenure.cli.files import lines
from tenure.errors import ConfigError
from tenure.sim.trace import TraceRequest
from tenure.traces import TraceError, header, key_blocks, read, write

MOONCAKE = '{"timestamp": 2500, "input_length": 1100, "output_length": 7, "hash_ids": [5, 6, 7], "type": "text"}'
OWN = '{"arrival": 1.5, "prompt_tokens": 70, "output_tokens": 40, "block_tokens": 32, "blocks": ["0a", "0b", "0c"]}'


def words(prompt: object) -> Sequence[int]:
    """A toy tokenizer: one token for each word."""
    if isinstance(prompt, list):
        prompt = " ".join(f"{message['role']}: {message['content']}" for message in prompt)
    assert isinstance(prompt, str)
    return [sum(map(ord, word)) for word in prompt.split()]


def test_mooncake() -> None:
    (request,) = read([MOONCAKE])
    assert (request.at, request.prompt_tokens, request.output_tokens) == (2.5, 1100, 7)
    assert request.blocks == (5, 6, 7)
    assert [request.block_size(at) for at in range(3)] == [512, 512, 76]
    assert [request.tokens_of(blocks) for blocks in range(4)] == [0, 512, 1024, 1100]
    assert request.extra == {"type": "text"}


def test_a_partial_block_may_have_no_id() -> None:
    (request,) = read(['{"timestamp": 0, "input_length": 1100, "output_length": 7, "hash_ids": [5, 6]}'])
    assert request.blocks == (5, 6)
    assert request.tokens_of(2) == 1024


def test_mooncake_fields_with_chats_are_seconds_and_small_blocks() -> None:
    line = '{"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.1, "input_length": 33, "output_length": 2, "hash_ids": [1, 2, 3], "turn": 1}'  # noqa: E501
    (request,) = read([line])
    assert (request.at, request.block_tokens, request.blocks) == (61.1, 16, (1, 2, 3))


def test_own_form_comes_back_as_it_was_written() -> None:
    request = TraceRequest(1.5, 70, 40, (10, 11), 32, "acme", (12,), "s1", 3, extra={"kv": {"cached_tokens": 64}})
    assert list(read([write(request)])) == [request]


def test_own_form_knows_which_blocks_hold_the_answer() -> None:
    (request,) = read([OWN])
    assert (request.blocks, request.answer) == ((10, 11), (12,))


def test_header_is_no_request() -> None:
    first = '{"tenure_trace": 1, "block_tokens": 32, "declared": ["memory"]}'
    assert len(list(read([first, OWN, first, OWN]))) == 2
    assert header([first, OWN])["declared"] == ["memory"]
    assert header([OWN]) == {}


def test_azure() -> None:
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03.9799600,4808,10",
            "2023-11-16 18:17:05.0319600,3180,8"]  # fmt: skip
    first, second = read(rows)
    assert (first.prompt_tokens, first.output_tokens, first.blocks) == (4808, 10, ())
    assert second.at - first.at == pytest.approx(1.052, abs=1e-5)


def test_texts_are_tokenised_and_keyed() -> None:
    text = " ".join(f"w{n}" for n in range(80))
    records = [
        {"timestamp": 1760587806328704, "input": text, "output": "four words come back", "session_id": "s"},
        {"timestamp": "2025-10-16T04:10:07Z", "body": {"messages": [{"role": "user", "content": text}]},
         "response": {"body": {"usage": {"completion_tokens": 9}, "kv": {"cached_tokens": 1}}}},
        {"created": 1760587808, "prompt": text + " and more", "cache_salt": "x"},
    ]  # fmt: skip
    first, second, third = read([json.dumps(record) for record in records], words)
    assert first.at == pytest.approx(1760587806.328704)
    assert (first.prompt_tokens, first.output_tokens, first.session) == (80, 4, "s")
    assert first.blocks == key_blocks(words(text), 32)
    assert (second.output_tokens, second.extra["kv"]) == (9, {"cached_tokens": 1})
    assert second.at == pytest.approx(1760587807.0)
    assert third.at == 1760587808.0
    assert not set(third.blocks) & set(first.blocks)


def test_texts_without_a_time_come_right_after_each_other() -> None:
    assert [request.at for request in read(['{"prompt": "a"}', '{"prompt": "b"}'], words)] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ([], 1, "empty"),
        (["", " "], 1, "empty"),
        ([MOONCAKE, MOONCAKE[:40]], 2, "not valid JSON"),
        ([MOONCAKE, "[1]"], 2, "JSON object"),
        ([MOONCAKE, "", '{"timestamp": 3, "input_length": 1, "output_length": 1}'], 3, "'hash_ids' is missing"),
        (['{"timestamp": 0, "input_length": -1, "output_length": 1, "hash_ids": []}'], 1, "input_length"),
        (['{"timestamp": "x", "input_length": 1, "output_length": 1, "hash_ids": []}'], 1, "finite number"),
        (['{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1, 2]}'], 1, "2 blocks of 512"),
        (['{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1.5]}'], 1, "block id"),
        (['{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": 7}'], 1, "list"),
        (['{"colour": "red"}'], 1, "unknown kind of trace with the fields colour"),
        (['{"prompt": "x"}'], 1, "--model"),
        ([OWN.replace('"block_tokens": 32', '"block_tokens": 0')], 1, "block_tokens"),
        ([OWN.replace('"0a"', '"zz"')], 1, "zz"),
        (['{"tenure_trace": 9}', OWN], 1, "version 9"),
        (['{"tenure_trace": 1}'], 1, "no requests"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03.9799600,4808"], 2, "generatedtokens"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "yesterday,1,2"], 2, "yesterday"),
    ],
)  # fmt: skip
def test_broken_lines_are_named(text: list[str], line: int, words: str) -> None:
    with pytest.raises(TraceError, match=words) as caught:
        list(read(text))
    assert caught.value.line == line
    assert str(caught.value).startswith(f"line {line}: ")


def test_packed_files(tmp_path: Path) -> None:
    plain, packed = tmp_path / "t.jsonl", tmp_path / "misnamed.jsonl"
    plain.write_text(MOONCAKE + "\n")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(read(lines(packed))) == list(read(lines(plain)))


def test_zstd(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    packed = tmp_path / "t.jsonl.zst"
    many = [MOONCAKE.replace("2500", str(at)) + "\n" for at in range(5000)]
    # More than one frame in a file, as parallel packers write them.
    packed.write_bytes(
        b"".join(zstandard.compress("".join(many[at : at + 1000]).encode()) for at in range(0, 5000, 1000))
    )
    found = list(read(lines(packed)))
    assert [request.at for request in found] == [pytest.approx(1e-3 * at) for at in range(5000)]
    assert found[-1].blocks == (5, 6, 7)


@pytest.mark.parametrize("spoil", [lambda raw: raw[:-9], lambda raw: raw[:20] + b"\xff" * 9 + raw[29:]])
def test_broken_zstd_is_no_end(spoil: Callable[[bytes], bytes], tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    packed = tmp_path / "t.jsonl.zst"
    packed.write_bytes(spoil(zstandard.compress("".join(f"{MOONCAKE}{at}\n" for at in range(99)).encode())))
    with pytest.raises(ConfigError, match="truncated or broken"):
        list(lines(packed))


def test_without_a_library_zstd_is_told_how_to_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("compression.zstd", "zstandard"):
        monkeypatch.setitem(sys.modules, name, None)
    packed = tmp_path / "t.jsonl.zst"
    packed.write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(ConfigError, match=r"pip install 'tenure\[zstd\]'"):
        list(lines(packed))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(MOONCAKE.encode() * 9)[:-20])
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, words in ((cut, "truncated"), (binary, "UTF-8"), (tmp_path / "none", "No such file")):
        with pytest.raises(ConfigError, match=words):
            list(lines(path))
