"""The quality gate as commands use it: figures that are known are used, others are measured and kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tenure.cli.options import complain
from tenure.config import Settings
from tenure.errors import ConfigError

if TYPE_CHECKING:
    from tenure.lab.gate import Floor, Quality
    from tenure.models.loader import Model


def figures(
    model: Model,
    names: Sequence[str],
    words: str,
    told: Callable[[str, float], None],
    *,
    again: bool = False,
    quick: bool = False,
) -> dict[str, Quality]:
    """Of the codecs `names`: what is known; what is not is measured and kept. A full measurement counts as quick."""
    from tenure.cli import figures as shelf
    from tenure.lab.gate import EXACT, measure, text_id

    text = text_id(words)
    known = {} if again else shelf.stored(model.fingerprint, text)
    usable = {name: found for name, found in known.items() if quick or found.collapse is not None}
    missing = [name for name in names if name not in usable]
    if missing:
        fresh = measure(model, missing, words, quick=quick, progress=told)
        place = shelf.keep(model.fingerprint, model.name, text, fresh)
        usable |= fresh
        complain(f"measured {', '.join(missing)} of {model.name}; kept in {place}")
    return {name: usable[name] for name in dict.fromkeys((EXACT, *names)) if name in usable}


def floor_of(settings: Settings) -> Floor:
    """The floor as the settings write it. ConfigError shows the form."""
    from tenure.lab.gate import floor

    try:
        return floor(settings.quality_floor)
    except ValueError as error:
        raise ConfigError("quality_floor", f"--quality-floor {settings.quality_floor!r}: {error}") from None


def gate(model: Model, codec: str, settings: Settings, told: Callable[[str, float], None]) -> str:
    """Pass the codec that is to be served: a line with its figure. ConfigError, with the numbers and the nearest codec
    that passes, when it misses the floor. What was never measured is, on a short text."""
    floor = floor_of(settings)
    if codec in ("bf16", "f32"):
        return "exact"
    if not settings.quality_gate:
        return "not measured (--no-quality-gate)"
    from tenure.lab.gate import shipped_text
    from tenure.spec import CODECS

    words = shipped_text()
    found = figures(model, [codec], words, told, quick=True)
    reason = floor.misses(found[codec])
    if not reason:
        own = found[codec]
        return f"KL {own.kl:.4f}, top-1 {own.top1:.3f} against bf16 on {own.tokens} tokens"
    # From the smallest that is larger than the one refused, up to bf16, which is no distance from itself.
    known = [name for name in CODECS if name != "f32"]
    for name in reversed(known[: known.index(codec)]):
        other = figures(model, [name], words, told, quick=True)
        if not floor.misses(other[name]):
            break
    raise ConfigError(
        "kv_cache_dtype",
        f"--kv-cache-dtype {codec} misses the quality floor here: {reason}; the nearest codec that passes is "
        f"{name} (KL {other[name].kl:.4f}, top-1 {other[name].top1:.3f}); or move --quality-floor, or say "
        "--no-quality-gate",
    )
