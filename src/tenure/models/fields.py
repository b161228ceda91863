"""Typed, range-checked reading of the key/value part of a model file. Every value there is somebody else's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tenure.errors import BrokenFile

_MISSING: Any = object()


class Fields:
    """The keys of one file. Each getter raises BrokenFile naming the file, the field and what was found."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where = where
        self._values = values

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """The same fields, and the defaults where a field is left out; null is not left out."""
        return Fields(self.where, {**defaults, **self._values})

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def integer(self, name: str, low: int, high: int, default: int = _MISSING) -> int:
        """An integer in [low, high]."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, value, "an integer")
        if not low <= value <= high:
            raise BrokenFile(f"{self.where}: {name} is {value}, expected {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float = _MISSING) -> float:
        """A finite number in [low, high]."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, value, "a number")
        if not low <= value <= high:
            raise BrokenFile(f"{self.where}: {name} is {value}, expected {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, default: bool = _MISSING) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str = _MISSING) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def items(self, name: str, kind: type, length: int | None = None) -> list[Any]:
        """A list whose elements are all of `kind`; of `length` elements when given."""
        value = self._get(name, _MISSING)
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self._wrong(name, value, "a list")
        if length is not None and len(value) != length:
            raise BrokenFile(f"{self.where}: {name} has {len(value)} entries, expected {length}")
        odd = set(map(type, value)) - {kind}
        if odd:
            found = ", ".join(sorted(t.__name__ for t in odd))
            raise BrokenFile(f"{self.where}: {name} must hold only {kind.__name__}, found {found}")
        return list(value)

    def section(self, name: str) -> Fields | None:
        """The object under `name`, None when absent or null."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(name, value, "an object")
        return Fields(f"{self.where}: {name}", value)

    def raw(self, name: str) -> Any:
        """The value as it is, None when absent."""
        return self._values.get(name)

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is None:
            if default is _MISSING:
                raise BrokenFile(f"{self.where}: the field {name} is missing")
            return default
        return value

    def _wrong(self, name: str, value: Any, wanted: str) -> BrokenFile:
        shown = repr(value)
        return BrokenFile(f"{self.where}: {name} must be {wanted}, found {shown[:60]}")
