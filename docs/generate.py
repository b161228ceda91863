"""Writes the pages that are made from code: docs/settings.md. A test holds page and code equal.

    python docs/generate.py
"""

from __future__ import annotations

from pathlib import Path

from tenure.config import MEMORY_FORMS, SETTINGS, Setting

DOCS = Path(__file__).resolve().parent
HEAD = f"""# Settings

*Written by `docs/generate.py` from `src/tenure/config.py`; change it there.*

Every setting can be given in four ways. The first that is there wins:

1. a flag: `tenure serve --max-num-seqs 8`
2. an environment variable: `TENURE_MAX_NUM_SEQS=8`
3. a line in the TOML file that `--config FILE` names: `max_num_seqs = 8` (dashes work too)
4. the default

An unknown name in the file is refused, with the nearest known one. Amounts of memory are written like {MEMORY_FORMS}.
`tenure chat`, `tenure bench` and `tenure doctor` take the settings that concern them under the same names.

"""


def settings_page() -> str:
    """The whole page, as Markdown."""
    page = HEAD
    for group in dict.fromkeys(setting.group for setting in SETTINGS):
        page += f"## {group}\n\n| flag | value | default | what it does |\n|---|---|---|---|\n"
        page += "".join(_row(setting) for setting in SETTINGS if setting.group == group) + "\n"
    return page.rstrip() + "\n"


def _row(setting: Setting) -> str:
    flag = f"`MODEL` (an argument)<br>`{setting.env}`" if setting.name == "model" else f"`{setting.flag}`<br>`{setting.env}`"
    label = setting.form.label.replace("|", "\\|")
    return f"| {flag} | {label} | {setting.shown} | {setting.help} |\n"


def main() -> None:
    """Write the pages."""
    (DOCS / "settings.md").write_text(settings_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
