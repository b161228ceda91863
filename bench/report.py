"""From the measurements of a run to its two tables: absolute figures, and ratios beside what is owed."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from bench.goals import Figures, Verdict, judge
from bench.targets import Target

NOISY = 0.10  # share of the machine's processor time taken by others, above which a repetition is marked

#       workload figure          heading             how
ROWS = (
    ("W1", "ttft_s", "W1 first token, s", "{:.3f}"),
    ("W1", "prefill_tps", "W1 prefill, tok/s", "{:.0f}"),
    ("W1", "decode_tps", "W1 decode, tok/s", "{:.1f}"),
    ("W2", "ttft_s", "W2 first token, s", "{:.2f}"),
    ("W2", "decode_tps", "W2 decode, tok/s", "{:.1f}"),
    ("W3", "wall_s", "W3 wall, s", "{:.2f}"),
    ("W3", "output_tps", "W3 output, tok/s", "{:.0f}"),
    ("W4", "wall_s", "W4 wall, s", "{:.2f}"),
    ("W4", "ttft_mean_s", "W4 first token, mean s", "{:.2f}"),
    ("W5", "wall_s", "W5 wall, s", "{:.2f}"),
    ("W5", "ttft_first_s", "W5 first token, turn 1, s", "{:.3f}"),
    ("W5", "ttft_sixth_s", "W5 first token, turn 6, s", "{:.3f}"),
    ("W6", "wall_s", "W6 wall, s", "{:.1f}"),
    ("W6", "ttft_max_s", "W6 first token, last, s", "{:.1f}"),
    ("W6", "finished", "W6 finished, of 16", "{:.0f}"),
    ("W6", "equal_to_solo", "W6 equal to solo, of 16", "{:.0f}"),
    ("start", "ready_s", "start to ready, s", "{:.2f}"),
    ("memory", "peak_rss_mib", "peak RSS, MiB", "{:.0f}"),
    ("memory", "overhead_mib", "RSS above accounted, MiB", "{:.0f}"),
    ("step", "step_ms", "step of 16, ms", "{:.1f}"),
    ("step", "python_share", "Python's share of it", "{:.1%}"),
)


def figures(measurements: Sequence[dict[str, Any]]) -> Figures:
    """Medians over repetitions; NaN for the speeds of a workload that a target did not finish or answered wrongly."""
    samples: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for one in measurements:
        for name, value in one["figures"].items():
            if isinstance(value, int | float):
                samples[one["target"], one["workload"], name].append(float(value))
    medians = {key: statistics.median(values) for key, values in samples.items()}
    for (target, workload, name), value in list(medians.items()):
        if name.endswith(("_s", "_tps")) and not _valid(target, workload, samples):
            medians[target, workload, name] = math.nan
        if name in ("peak_rss_mib", "overhead_mib"):
            before = medians.get((target, "memory", name), 0.0)
            medians[target, "memory", name] = max(before, value)
    return medians


def _valid(target: str, workload: str, samples: dict[tuple[str, str, str], list[float]]) -> bool:
    asked, finished = (samples.get((target, workload, name), []) for name in ("requests", "finished"))
    equal = samples.get((target, workload, "equal_to_solo"), asked)
    return asked == finished and (not target.startswith("tenure") or min(equal, default=0) == max(asked, default=0))


def absolute(targets: Sequence[Target], medians: Figures) -> str:
    """One row per figure, one column per target, as Markdown."""
    lines = [["", *(t.name for t in targets)]]
    for workload, name, heading, how in ROWS:
        cells = [medians.get((t.name, workload, name)) for t in targets]
        if any(cell is not None for cell in cells):
            lines.append([heading, *("" if c is None else "failed" if math.isnan(c) else how.format(c) for c in cells)])
    return _markdown(lines)


def ratios(verdicts: Sequence[Verdict]) -> str:
    """What is owed and what was reached, as Markdown."""
    lines = [["goal", "ours", "best peer", "ratio", "at least", "aim", ""]]
    for verdict in verdicts:
        goal, sign = verdict.goal, "≥" if verdict.goal.better == "more" else "≤"
        times = " ×" if goal.peers else ""
        lines.append(
            [
                goal.title,
                _chosen(verdict.ours),
                _chosen(verdict.peer) if goal.peers else "",
                "" if verdict.ratio is None else f"{verdict.ratio:.3g}{times}",
                f"{sign} {goal.least:g}{times}",
                f"{goal.aim:g}{times}",
                verdict.word,
            ]
        )
    return _markdown(lines)


def _chosen(chosen: tuple[str, float] | None) -> str:
    return f"{chosen[1]:.4g} ({chosen[0]})" if chosen else "–"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rows = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    return "\n".join([rows[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *rows[1:]])


def render(results: dict[str, Any]) -> str:
    """The whole report of a saved run."""
    targets = [Target(**entry) for entry in results["targets"]]
    measurements = results["measurements"]
    medians = figures(measurements)
    where = results["machine"]
    lines = [
        f"{where['cpu']}, {where['cores']} cores, {where['memory_gib']} GiB, Linux {where['kernel']}; "
        f"commit {results['commit']}; {results['started']}; medians of {results['repetitions']}; {results['data']}",
        "",
        absolute(targets, medians),
        "",
        ratios(judge(targets, medians)),
        "",
        "versions: " + ", ".join(f"{name} {version}" for name, version in results["versions"].items()),
    ]
    lines += [f"{name}: {why}" for name, why in results["skipped"].items()]
    lines += [
        f"{one['target']} {one['workload']}: {one['figures']['finished']} of {one['figures']['requests']} finished; "
        f"{'; '.join(one['figures']['errors']) or 'cut short without an error'}"
        for one in measurements
        if one["figures"].get("finished") != one["figures"].get("requests")
    ]
    noisy = [one for one in measurements if one.get("foreign", 0.0) > NOISY]
    if noisy:
        lines.append(
            f"{len(noisy)} of {len(measurements)} repetitions had others on more than {NOISY:.0%} of the machine"
        )
    return "\n".join(lines)
