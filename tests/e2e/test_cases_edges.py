"""Cases E1 and E3 of shared/cases: the edges of the API."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.e2e.support import Running

HELLO = [{"role": "user", "content": "Hello"}]
EDGES: list[tuple[str, dict[str, Any], str | None]] = [
    ("chat", {"messages": [], "max_tokens": 4}, "messages"),
    ("chat", {"messages": [{"role": "user", "content": ""}], "max_tokens": 4}, None),
    ("text", {"prompt": "", "max_tokens": 4}, "prompt"),
    ("text", {"prompt": [], "max_tokens": 4}, "prompt"),
    ("chat", {"messages": HELLO, "max_tokens": 0}, "max_tokens"),
    ("chat", {"messages": HELLO, "max_tokens": -1}, "max_tokens"),
    ("chat", {"messages": HELLO}, None),
    ("chat", {"messages": HELLO, "max_tokens": 10**9}, None),
]
PATHS = {"chat": "/v1/chat/completions", "text": "/v1/completions"}


@pytest.mark.parametrize(("kind", "body", "param"), EDGES)
def test_e1_edges_are_answered_the_same_every_time(
    server: Running, kind: str, body: dict[str, Any], param: str | None
) -> None:
    replies = [server.http.post(PATHS[kind], json={**body, "temperature": 0, "stop": ["\n"]}) for _ in range(3)]
    if param is None:
        assert [reply.status_code for reply in replies] == [200] * 3
        assert len({json.dumps(reply.json()["choices"]) for reply in replies}) == 1
    else:
        assert {reply.status_code for reply in replies} <= {400, 422}
        errors = [reply.json()["error"] for reply in replies]
        assert all(param in str(error["param"]) for error in errors)
        assert len({json.dumps(error) for error in errors}) == 1
    server.complete("the next normal request", 2)


REPEATS = {
    "emoji": "😀😀😀😀😀😀😀😀😀😀",
    "hangul": "안녕하세요 안녕하세요 안녕하세요 안녕하세요 안녕하세요 안녕",
    "combining": "e\u0301e\u0301e\u0301e\u0301e\u0301e\u0301e\u0301e\u0301e\u0301e\u0301e\u0301e\u0301",
}


def streamed(server: Running, body: dict[str, Any]) -> str:
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
        events = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])


@pytest.mark.parametrize("text", REPEATS.values(), ids=REPEATS.keys())
def test_e3_forced_characters_stream_whole(server: Running, text: str) -> None:
    """A guide leaves the model no choice: whatever it was going to say, it says these characters, byte by byte."""
    ask = {"prompt": "Say it:", "temperature": 0, "guided_choice": [text], "return_token_ids": True}
    whole = server.http.post("/v1/completions", json={**ask, "max_tokens": 400}).json()["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (text, "stop")
    assert streamed(server, {**ask, "max_tokens": 400}) == text
    count = len(whole["token_ids"]) - 1  # the last one is the end
    assert count > len(text) / 4
    for tokens in range(1, min(count, 12)):
        cut = server.http.post("/v1/completions", json={**ask, "max_tokens": tokens}).json()["choices"][0]
        assert streamed(server, {**ask, "max_tokens": tokens}) == cut["text"]
        assert cut["finish_reason"] == "length"
        assert text.startswith(cut["text"].rstrip("\ufffd"))
        assert "\ufffd" not in cut["text"][:-1]


@pytest.mark.parametrize("prompt", REPEATS.values(), ids=REPEATS.keys())
def test_e3_characters_of_many_tokens_stream_whole(server: Running, prompt: str) -> None:
    seen = ""
    for tokens in range(1, 13):
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        choice = server.http.post("/v1/completions", json=body).json()["choices"][0]
        whole = choice["text"]
        assert streamed(server, body) == whole
        assert server.http.post("/detokenize", json={"tokens": choice["token_ids"]}).json()["prompt"] == whole
        # max_tokens may cut a character: what is left of it shows as one U+FFFD at the very end, nowhere else.
        assert "\ufffd" not in whole[:-1]
        seen = whole.rstrip("\ufffd")
    assert any(ord(character) > 0x2FF for character in seen), f"the model did not go on in kind: {seen!r}"
