"""Config, weights, tokenizer and chat template of a model, and the decoder that runs it.

The names below are loaded on first use, so that importing a neighbour of this package stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenure.models.loader import Model, load
    from tenure.models.sources import ModelInfo, find_default, inspect
    from tenure.models.template import ChatTemplate
    from tenure.models.tokenizer import TextDecoder, Tokenizer

_HOMES = {
    "Model": "loader",
    "ModelInfo": "sources",
    "find_default": "sources",
    "inspect": "sources",
    "load": "loader",
    "ChatTemplate": "template",
    "TextDecoder": "tokenizer",
    "Tokenizer": "tokenizer",
}

__all__ = ["ChatTemplate", "Model", "ModelInfo", "TextDecoder", "Tokenizer", "find_default", "inspect", "load"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
