"""The public face: short, listed here, and fetched only when touched."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tenure

PUBLIC = ["Engine", "EngineSettings", "Result", "__version__", "load"]


def test_the_public_list_is_this_one() -> None:
    assert sorted(tenure.__all__) == PUBLIC
    assert set(PUBLIC) <= set(dir(tenure))
    for name in PUBLIC:
        assert getattr(tenure, name) is not None


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'engine_of_doom'"):
        tenure.engine_of_doom  # noqa: B018


def test_importing_the_package_brings_no_engine() -> None:
    probe = "import sys, tenure; print('tenure.engine' in sys.modules); tenure.Engine; print('numpy' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60).stdout
    assert out.split() == ["False", "True"]
