"""Tenure: an LLM serving runtime in which the KV cache is a managed, visible resource.

    with tenure.Engine.load() as engine:
        print(engine.generate("The KV cache is", max_tokens=32).text)

The public face is lazy, so that `import tenure.cache` stays light: the names below bring numpy and the native module
with them only when they are first touched.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenure.engine import Engine as Engine
    from tenure.engine import EngineSettings as EngineSettings
    from tenure.engine import Result as Result
    from tenure.models import load as load

__version__ = "0.1.0"
_LAZY = {
    "Engine": "tenure.engine",
    "EngineSettings": "tenure.engine",
    "Result": "tenure.engine",
    "load": "tenure.models",
}
__all__ = ["Engine", "EngineSettings", "Result", "__version__", "load"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
