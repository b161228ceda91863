"""`tools` and `tool_choice`: what a model may call, and what it must."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tenure.errors import InvalidRequest
from tenure.server.body import check_depth
from tenure.server.guides import check_guide
from tenure.server.serves import Reader, Serves
from tenure.types import Guide, Part

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools that a prompt tells of, and the guide that makes the answer call them."""

    tools: tuple[Mapping[str, Any], ...] = ()
    guide: Guide | None = None
    single: bool = False
    """`parallel_tool_calls: false`: an answer has one call at most."""

    def reads(self, make: Callable[[], Reader] | None) -> Callable[[], Reader] | None:
        """What makes the readers of answers, from what makes those that read all calls."""
        return (lambda: FirstCall(make())) if self.single and make is not None else make


class FirstCall:
    """Reads an answer as another reader does, and passes on none of its calls but the first. Of an answer that may be
    text as well no guide can ask that: its further calls are computed and counted, and not told."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def push(self, text: str) -> list[Part]:
        return self._first(self._reader.push(text))

    def finish(self) -> list[Part]:
        return self._first(self._reader.finish())

    def _first(self, parts: list[Part]) -> list[Part]:
        return [part for part in parts if part.kind in ("text", "reasoning") or part.call == 0]


def read_offer(serves: Serves, fields: Mapping[str, Any]) -> Offer:
    """The tools of a chat's body. InvalidRequest when they are malformed or the model's template knows none."""
    tools, choice = fields.get("tools") or [], fields.get("tool_choice")
    parallel = fields.get("parallel_tool_calls")
    if not isinstance(parallel, bool | None):
        raise InvalidRequest("parallel_tool_calls: must be true or false", param="parallel_tool_calls")
    single = parallel is False
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
    if choice == "none":
        return Offer()
    if not serves.card.calls:
        raise InvalidRequest("tools: this model's chat template has none, so it cannot call any", param="tools")
    if named is None and choice != "required":
        return Offer(tuple(tools), single=single)
    chosen = [tool for tool in tools if named in (None, tool["function"]["name"])]
    if not chosen:
        raise InvalidRequest(f"tool_choice: there is no tool {named!r:.80}", param="tool_choice")
    # A named function is called once (as OpenAI has it); `required` asks for one call or more.
    guide = serves.call_guide(chosen, one=single or named is not None)
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
