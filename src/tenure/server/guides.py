"""The fields that say what an answer must be, under OpenAI's and vLLM's names, as one `Guide`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tenure.errors import InvalidRequest
from tenure.server.body import check_depth
from tenure.server.serves import Serves
from tenure.types import Guide

ANY_OBJECT = Guide("json_schema", '{"type":"object"}')
MAX_CHOICES = 1024
_NAMES = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
FIELDS = ("response_format", "structured_outputs", *_NAMES)


def read_guide(serves: Serves, fields: Mapping[str, Any]) -> Guide | None:
    """The guide that a body's fields ask for, compiled; None when they ask for none. Raises InvalidRequest."""
    found: list[tuple[str, Guide]] = []
    for name in FIELDS:
        value = fields.get(name)
        check_depth(value, name)
        guide = None if value is None else _read(name, value)
        if guide is not None:
            found.append((name, guide))
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise InvalidRequest(f"{names}: an answer can follow one of them only", param=found[1][0])
    name, guide = found[0]
    check_guide(serves, guide, name)
    return guide


def check_guide(serves: Serves, guide: Guide, param: str) -> None:
    """Compile it. InvalidRequest that names `param` when it cannot be followed."""
    try:
        serves.check_guide(guide)
    except InvalidRequest as error:
        raise InvalidRequest(f"{param}: {error.message}", param=param, **error.numbers) from error


def _read(name: str, value: Any) -> Guide | None:
    if name == "response_format":
        return _response_format(value)
    if name == "structured_outputs":
        return _structured_outputs(value)
    return _by_kind(name.removeprefix("guided_"), value, name)


def _response_format(value: Any) -> Guide | None:
    """`{"type": "text" | "json_object" | "json_schema"}`."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        raise InvalidRequest(
            "response_format.type: must be text, json_object or json_schema", param="response_format.type"
        )
    inner = value.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(
            "response_format.json_schema.schema: must be a JSON schema", param="response_format.json_schema.schema"
        )
    return Guide("json_schema", _dump(schema))


def _structured_outputs(value: Any) -> Guide | None:
    """vLLM's object: one of json, regex, choice, grammar and json_object."""
    param = "structured_outputs"
    given = {k: v for k, v in value.items() if v not in (None, False)} if isinstance(value, dict) else {}
    strange = next((k for k in given if k not in ("json", "regex", "choice", "grammar", "json_object")), None)
    if strange is not None:
        raise InvalidRequest(f"{param}.{strange:.64} is not built yet; leave it out", param=f"{param}.{strange:.64}")
    if len(given) != 1:
        raise InvalidRequest(f"{param}: must have one of json, regex, choice, grammar and json_object", param=param)
    kind, inner = next(iter(given.items()))
    return ANY_OBJECT if kind == "json_object" else _by_kind(kind, inner, f"{param}.{kind}")


def _by_kind(kind: str, value: Any, param: str) -> Guide:
    if kind == "json":
        if not isinstance(value, dict | str | bool):
            raise InvalidRequest(f"{param}: must be a JSON schema, as an object or as text", param=param)
        return Guide("json_schema", value if isinstance(value, str) else _dump(value))
    if kind == "choice":
        choices = isinstance(value, list) and all(isinstance(choice, str) for choice in value)
        if not choices or not 1 <= len(value) <= MAX_CHOICES:
            raise InvalidRequest(f"{param}: must be a list of 1 to {MAX_CHOICES} strings", param=param)
        return Guide("choice", _dump(value))
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{param}: must be a string, and not an empty one", param=param)
    return Guide("regex", value) if kind == "regex" else Guide("grammar", value)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
