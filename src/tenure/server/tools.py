"""`tools` and `tool_choice`: what a model may call, and what it must."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tenure.errors import InvalidRequest
from tenure.server.body import check_depth
from tenure.server.guides import check_guide
from tenure.server.serves import Serves
from tenure.types import Guide

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools that a prompt tells of, and the guide that makes the answer call them."""

    tools: tuple[Mapping[str, Any], ...] = ()
    guide: Guide | None = None


def read_offer(serves: Serves, fields: Mapping[str, Any]) -> Offer:
    """The tools of a chat's body. InvalidRequest when they are malformed or the model's template knows none."""
    tools, choice = fields.get("tools") or [], fields.get("tool_choice")
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools: must be a list of at most {MAX_TOOLS} tools", param="tools")
    check_depth(tools, "tools")
    named = _choice(choice)
    for number, tool in enumerate(tools):
        _check(tool, f"tools[{number}]")
    if not tools:
        if named or choice == "required":
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        return Offer()
    if not serves.card.calls:
        raise InvalidRequest("tools: this model's chat template has none, so it cannot call any", param="tools")
    if choice == "none":
        return Offer()
    if named is None and choice != "required":
        return Offer(tuple(tools))
    chosen = [tool for tool in tools if named in (None, tool["function"]["name"])]
    if not chosen:
        raise InvalidRequest(f"tool_choice: there is no tool {named!r:.80}", param="tool_choice")
    guide = serves.call_guide(chosen)
    check_guide(serves, guide, "tools")
    return Offer(tuple(tools), guide)


def check_calls(value: Any) -> list[dict[str, Any]] | None:
    """The `tool_calls` of a message that comes back; ValueError when they are malformed."""
    if not value:
        return None
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise ValueError(f"must be a list of at most {MAX_TOOLS} calls")
    for call in value:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise ValueError("must be calls of type function")
        if not isinstance(function.get("name"), str) or not isinstance(function.get("arguments"), str):
            raise ValueError("must have a function with a name and arguments, both strings")
        if not isinstance(call.get("id", ""), str):
            raise ValueError("must have ids that are strings")
    return value


def _choice(choice: Any) -> str | None:
    """The name of the tool that must be called, when one is."""
    if choice in (None, "none", "auto", "required"):
        return None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest("tool_choice: must be none, auto, required or name a function", param="tool_choice")
    return name


def _check(tool: Any, param: str) -> None:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise InvalidRequest(f"{param}: must be of type function, with a function", param=param)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"{param}.function.name: must have 1 to 64 letters, digits, dots, dashes or underscores"
        raise InvalidRequest(message, param=f"{param}.function.name")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(
            f"{param}.function.parameters: must be a JSON schema", param=f"{param}.function.parameters"
        )
