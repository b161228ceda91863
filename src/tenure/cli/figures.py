"""Figures of the quality gate, kept in the user's cache under the fingerprint of the model they were measured on.

Only the version of Tenure that measured them uses them: another one may encode differently.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tenure
from tenure.cli.calibration import cache_dir
from tenure.cli.options import complain
from tenure.errors import ConfigError

if TYPE_CHECKING:
    from tenure.lab.gate import Quality


def file(fingerprint: str) -> Path:
    return cache_dir() / "quality" / f"{fingerprint}.json"


def stored(fingerprint: str, text: str) -> dict[str, Quality]:
    """What was measured of this model on this text, by codec. Figures of anything else are told and left aside."""
    from tenure.lab.gate import of_json

    place = file(fingerprint)
    try:
        return dict(of_json(_texts(place, fingerprint).get(text, {}), str(place)))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        complain(f"{place}: figures not used: {error}; they are measured again")
        return {}


def _texts(place: Path, fingerprint: str) -> dict[str, Any]:
    """What the file holds, by text. ConfigError when it is not of this model, or not by this version."""
    found: Any = json.loads(place.read_bytes())
    if found["fingerprint"] != fingerprint:
        raise ConfigError("quality", f"they are of another model ({found['fingerprint']})")
    if found.get("version") != tenure.__version__:
        raise ConfigError("quality", f"they were measured by another version of Tenure ({found.get('version')})")
    texts: dict[str, Any] = found["texts"]
    return texts


def keep(fingerprint: str, name: str, text: str, found: dict[str, Quality]) -> Path:
    """Add figures to those of the model; the path."""
    from tenure.lab.gate import to_json

    place = file(fingerprint)
    texts: dict[str, Any] = {}
    if place.is_file():
        try:
            texts = _texts(place, fingerprint)
        except ConfigError:
            texts = {}  # of something else: their place is taken
        except (ValueError, KeyError, TypeError, AttributeError):
            complain(f"{place}: broken, written again")
    texts[text] = texts.get(text, {}) | to_json(found)
    held = {"fingerprint": fingerprint, "version": tenure.__version__, "model": name, "texts": texts}
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(held, indent=1) + "\n")
    return place
