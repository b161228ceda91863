"""What holds for all tests."""

from __future__ import annotations

import os
import tempfile

import pytest

_home = tempfile.TemporaryDirectory(prefix="tenure-tests-")


def pytest_configure(config: pytest.Config) -> None:
    """What this machine has measured (calibrations, figures of quality) is none of the tests' business."""
    os.environ["XDG_CACHE_HOME"] = _home.name
