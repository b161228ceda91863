"""A completions server of a few lines: it "generates" its prompt's tokens plus one, at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator


def answer(prompt: list[int], count: int) -> list[int]:
    """What the fake model generates."""
    return [(prompt[i % len(prompt)] + 1) % 50_000 for i in range(count)]


class FakeServer:
    """Counts its requests; with `cut`, ends every stream without its last token; with `refuse`, answers 429."""

    def __init__(self, *, cut: bool = False, refuse: bool = False) -> None:
        self.cut, self.refuse = cut, refuse
        self.prompts: list[list[int]] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length:")[1].split()[0])
        body = await reader.readexactly(length)
        if head.startswith("GET"):
            reply = b'{"data": [{"id": "fake"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(reply) + reply)
        elif self.refuse:
            writer.write(b'HTTP/1.1 429 Too Many Requests\r\n\r\n{"error": {"code": "queue_full"}}')
        else:
            await self.stream(json.loads(body), writer)
        writer.close()

    async def stream(self, asked: dict[str, object], writer: asyncio.StreamWriter) -> None:
        """Chunks that end in the middle of events, as a real network's do."""
        assert asked["model"] == "fake" and asked["ignore_eos"] is True and asked["temperature"] == 0
        prompt, count = asked["prompt"], asked["max_tokens"]
        assert isinstance(prompt, list) and isinstance(count, int)
        self.prompts.append(prompt)
        tokens = answer(prompt, count)[: count - self.cut]
        events = [{"choices": [{"text": f" {token}", "token_ids": [token]}]} for token in tokens]
        usage = {"completion_tokens": len(tokens), "prompt_tokens_details": {"cached_tokens": 3}}
        text = "".join(f"data: {json.dumps(e)}\n\n" for e in [*events, {"choices": [], "usage": usage}])
        raw = (text + "data: [DONE]\n\n").encode()
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for start in range(0, len(raw), 700):
            piece = raw[start : start + 700]
            chunk = b"%x\r\n%s\r\n" % (len(piece), piece)
            writer.write(chunk[:5])
            await writer.drain()
            await asyncio.sleep(0)
            writer.write(chunk[5:])
        writer.write(b"0\r\n\r\n")

    @contextlib.contextmanager
    def running(self) -> Iterator[FakeServer]:
        """Listen on a free port, in a thread, until the block ends."""
        up, stop = threading.Event(), asyncio.Event()

        async def listen() -> None:
            self.loop = asyncio.get_running_loop()
            server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            up.set()
            async with server:
                await stop.wait()

        thread = threading.Thread(target=lambda: asyncio.run(listen()))
        thread.start()
        up.wait()
        try:
            yield self
        finally:
            self.loop.call_soon_threadsafe(stop.set)
            thread.join()
