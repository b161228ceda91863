"""Writes the pages that are made from code: docs/settings.md and docs/metrics.md. A test holds pages and code equal.

python docs/generate.py
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any, cast

from tenure import events
from tenure.config import MEMORY_FORMS, SETTINGS, Setting
from tenure.events import Fact, FactLog
from tenure.server.metrics import Metrics
from tenure.server.serves import ModelCard, Serves
from tenure.types import PoolCounts, Snapshot

DOCS = Path(__file__).resolve().parent
SETTINGS_HEAD = f"""# Settings

*Written by `docs/generate.py` from `src/tenure/config.py`; change it there.*

Every setting can be given in four ways. The first that is there wins:

1. a flag: `tenure serve --max-num-seqs 8`
2. an environment variable: `TENURE_MAX_NUM_SEQS=8`
3. a line in the TOML file that `--config FILE` names: `max_num_seqs = 8` (dashes work too)
4. the default

An unknown name in the file is refused, with the nearest known one. Amounts of memory are written like
{MEMORY_FORMS}.
A switch (true|false) is a flag without a value: `--insecure`, and with `no-` in front to turn it off,
`--no-quality-gate`.
`tenure chat`, `tenure bench` and `tenure doctor` take the settings that concern them under the same names.

"""


def settings_page() -> str:
    """The whole page, as Markdown."""
    page = SETTINGS_HEAD
    for group in dict.fromkeys(setting.group for setting in SETTINGS):
        page += f"## {group}\n\n| flag | value | default | what it does |\n|---|---|---|---|\n"
        page += "".join(_row(setting) for setting in SETTINGS if setting.group == group) + "\n"
    return page.rstrip() + "\n"


def _row(setting: Setting) -> str:
    flag = (
        f"`MODEL` (an argument)<br>`{setting.env}`"
        if setting.name == "model"
        else f"`{setting.flag}`<br>`{setting.env}`"
    )
    label = setting.form.label.replace("|", "\\|")
    return f"| {flag} | {label} | {setting.shown} | {setting.help} |\n"


METRICS_HEAD = """# Metrics and facts

*Written by `docs/generate.py` from the code; change it there.*

`GET /metrics` speaks Prometheus. What vLLM has too carries vLLM's name, so that its dashboards and the Gateway API's
inference extension work unchanged; `tenure:` is what nobody else has. Every metric has the labels `model_name` and
`engine`. Counters get `_total` at the end, as Prometheus wants. `tenure:kv_blocks` always adds up to the pool, and
`tenure:leaked_blocks` is 0, or there is a bug.

"""
FACTS_HEAD = """## Facts

What happens is told as facts: immutable records in one bounded log, each with its time (`at`, in seconds) and the
tenant it concerns (`tenant`, empty when it concerns nobody in particular). Policies
learn from them, the metrics are a fold over them. A reader that comes too late is told so by a fact of its own.

| fact | fields | what it tells |
|---|---|---|
"""


class _Idle:
    """Just enough of a server that nobody has asked anything for its metrics to be listed."""

    facts = FactLog()
    card = ModelCard("", 0, 0, 0, "", "bf16", "", has_template=False)

    def stats(self) -> Snapshot:
        zeros: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(Snapshot)}
        return Snapshot(**{**zeros, "pool": PoolCounts(0, 0, 0, 0), "codec": "bf16", "tenants": (), "by_codec": ()})


def metrics_page() -> str:
    """The whole page, as Markdown."""
    rows: dict[str, list[str]] = {"gauge": [], "counter": [], "histogram": []}
    for family in Metrics(cast(Serves, _Idle())).collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        # The client library keeps a family's label names to itself as long as it has no sample.
        labels = [label for label in getattr(family, "_labelnames") if label not in ("model_name", "engine")]  # noqa: B009
        shown = ", ".join(f"`{label}`" for label in labels)
        rows[family.type].append(f"| `{name}` | {shown} | {family.documentation} |\n")
    page = METRICS_HEAD
    for kind, lines in rows.items():
        page += f"## {kind.capitalize()}s\n\n| name | labels | meaning |\n|---|---|---|\n{''.join(lines)}\n"
    return (page + FACTS_HEAD + "".join(map(_fact_row, all_facts()))).rstrip() + "\n"


def all_facts() -> list[type[Fact]]:
    """Every kind of fact, in the order they are declared."""
    kinds = [kind for kind in vars(events).values() if inspect.isclass(kind) and issubclass(kind, Fact)]
    return [kind for kind in kinds if kind is not Fact]


def _fact_row(kind: type[Fact]) -> str:
    names = ", ".join(f"`{field.name}`" for field in dataclasses.fields(kind) if field.name not in ("at", "tenant"))
    words = inspect.getdoc(kind) or ""
    # A dataclass without a docstring is given its signature as one, which says nothing.
    told = "" if words.startswith(f"{kind.__name__}(") else " ".join(words.split())
    return f"| `{kind.__name__}` | {names} | {told} |\n"


PAGES = {"settings.md": settings_page, "metrics.md": metrics_page}


def main() -> None:
    """Write the pages."""
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
