"""The loop that serves: one thread owns scheduler and cache.

The names below are loaded on first use, so that importing a neighbour of this package stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenure.engine.engine import Engine
    from tenure.engine.handle import Handle
    from tenure.engine.options import Answer, Call, Options, Result
    from tenure.engine.python import AsyncStream, Stream
    from tenure.engine.settings import EngineSettings

_HOMES = {
    "Answer": "options",
    "AsyncStream": "python",
    "Call": "options",
    "Engine": "engine",
    "EngineSettings": "settings",
    "Handle": "handle",
    "Options": "options",
    "Result": "options",
    "Stream": "python",
}

__all__ = ["Answer", "AsyncStream", "Call", "Engine", "EngineSettings", "Handle", "Options", "Result", "Stream"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
