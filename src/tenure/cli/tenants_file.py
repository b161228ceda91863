"""The file that `--tenants` names.

    [[tenant]]
    name = "acme"
    keys = ["sk-1", "sk-2"]
    weight = 3                     # served three times what a tenant of weight 1 is, while both have work
    max_concurrent = 8             # requests at the same time
    max_queued_tokens = 200_000    # prompt tokens that may wait
    max_kv_bytes = "2GiB"          # held by its running sequences
    max_pinned_bytes = "256MiB"    # kept by pins; without it pins are refused

    [[shared_prefix]]              # every tenant may hit these, and find out by timing that they are held
    text = "You are a helpful assistant."          # or tokens = [1, 2, 3]
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from tenure.config import near, size
from tenure.errors import ConfigError
from tenure.tenants import SharedPrefix, Tenant, Tenants

PARAM = "tenants"


def read_tenants(file: Path) -> Tenants:
    """Parse a tenants file. ConfigError names the file, the tenant and what is wrong; nothing is half applied."""
    try:
        with file.open("rb") as stream:
            table = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(PARAM, f"--tenants {file}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(PARAM, f"--tenants {file}: not valid TOML: {error}") from None
    try:
        return parse_tenants(table)
    except ConfigError as error:
        raise ConfigError(PARAM, f"--tenants {file}: {error}") from None


def parse_tenants(table: Mapping[str, Any]) -> Tenants:
    """The content of a tenants file. ConfigError says where it is wrong."""
    _known("the file", table, ("tenant", "shared_prefix"))
    tenants = tuple(_tenant(number, entry) for number, entry in enumerate(_tables(table, "tenant"), 1))
    shared = tuple(_shared(number, entry) for number, entry in enumerate(_tables(table, "shared_prefix"), 1))
    _once("tenant name", (tenant.name for tenant in tenants))
    _once("API key", (key for tenant in tenants for key in tenant.keys))
    return Tenants(tenants, shared)


def _tenant(number: int, entry: Mapping[str, Any]) -> Tenant:
    name = entry.get("name")
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(PARAM, f"tenant {number}: name must be a text that is not empty")
    where = f"tenant {name!r}"
    _known(where, entry, tuple(field.name for field in fields(Tenant)))
    keys = entry.get("keys", [])
    if not isinstance(keys, list) or not all(isinstance(key, str) and key.strip() for key in keys):
        raise ConfigError(PARAM, f"{where}: keys must be a list of texts that are not empty")
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise ConfigError(PARAM, f"{where}: weight must be a number above 0, not {weight!r}")
    return Tenant(
        name,
        tuple(keys),
        float(weight),
        _count(where, entry, "max_concurrent"),
        _count(where, entry, "max_queued_tokens"),
        _bytes(where, entry, "max_kv_bytes"),
        _bytes(where, entry, "max_pinned_bytes") or 0,
    )


def _shared(number: int, entry: Mapping[str, Any]) -> SharedPrefix:
    where = f"shared_prefix {number}"
    _known(where, entry, ("text", "tokens"))
    if len(entry) != 1:
        raise ConfigError(PARAM, f"{where}: give either text or tokens")
    text, tokens = entry.get("text"), entry.get("tokens")
    if text is not None:
        if not isinstance(text, str) or not text:
            raise ConfigError(PARAM, f"{where}: text must be a text that is not empty")
        return SharedPrefix(text=text)
    whole = isinstance(tokens, list) and all(type(token) is int and 0 <= token < 2**32 for token in tokens)
    if not tokens or not whole:
        raise ConfigError(PARAM, f"{where}: tokens must be a list of token ids that is not empty")
    return SharedPrefix(tokens=tuple(tokens))


def _tables(table: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    entries = table.get(name, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(PARAM, f"{name} must be written as [[{name}]]")
    return entries


def _known(where: str, entry: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in entry:
        if name not in names:
            raise ConfigError(PARAM, f"{where}: unknown field {name!r}; known: {', '.join(names)}{near(name, names)}")


def _once(what: str, values: Iterable[str]) -> None:
    """Each of `values` may be there once. Keys are secrets: they are named by their last characters only."""
    seen = set()
    for value in values:
        if value in seen:
            shown = f"that ends in …{value[-2:]}" if what == "API key" else repr(value)
            raise ConfigError(PARAM, f"the {what} {shown} is there twice")
        seen.add(value)


def _count(where: str, entry: Mapping[str, Any], name: str) -> int | None:
    value = entry.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(PARAM, f"{where}: {name} must be a whole number of at least 1, not {value!r}")
    return value


def _bytes(where: str, entry: Mapping[str, Any], name: str) -> int | None:
    value = entry.get(name)
    if value is None:
        return None
    try:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError("must be an amount such as 32MiB, or a number of bytes")
        return size(str(value))
    except ValueError as error:
        raise ConfigError(PARAM, f"{where}: {name} {value!r}: {error}") from None
