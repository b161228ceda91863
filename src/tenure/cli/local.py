"""An engine and its server inside this process, on a free loopback port: what `chat` and `bench` use without --url."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from tenure.config import Settings


@contextlib.contextmanager
def local_server(settings: Settings) -> Iterator[str]:
    """Start it, give its URL, stop it. The same HTTP way as any client, so its numbers are the server's."""
    from tenure.cli.compose import compose
    from tenure.cli.lifecycle import in_thread

    with compose(dataclasses.replace(settings, host="127.0.0.1")) as composed, in_thread(composed) as url:
        yield url
