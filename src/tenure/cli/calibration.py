"""This machine's calibration: measured by `tenure doctor --calibrate`, read by `tenure plan`, `replay` and `lint`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tenure.cli.options import complain
from tenure.errors import ConfigError

if TYPE_CHECKING:
    from tenure.planner.speed import Calibration


def cache_dir() -> Path:
    """Where what was measured is kept: $XDG_CACHE_HOME/tenure, else ~/.cache/tenure."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if home.startswith("/") else Path.home() / ".cache") / "tenure"


def file() -> Path:
    return cache_dir() / "calibration.json"


def stored() -> Calibration | None:
    """What is known of this machine; None: nothing. A file that is broken is told and left aside."""
    from tenure.planner.speed import Calibration

    try:
        found = json.loads(file().read_bytes())
        return Calibration.of_json(found if isinstance(found, dict) else {}, str(file()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ConfigError) as error:
        complain(f"{file()}: not a calibration: {error}; run `tenure doctor --calibrate` again")
        return None


def here() -> Calibration | None:
    """`stored`, if it is of this machine; another's is told and left aside."""
    from tenure.cli.machine import probe

    found = stored()
    if found is not None and not found.machine.startswith(probe().cpu):
        complain(f"the calibration is of {found.machine}; `tenure doctor --calibrate` measures this machine")
        return None
    return found


def keep(calibration: Calibration) -> Path:
    """Write it where `stored` looks; the path."""
    place = file()
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(calibration.to_json(), indent=2) + "\n", encoding="utf-8")
    return place
