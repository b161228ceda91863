"""``python -m bench run`` measures, ``python -m bench show RESULTS.json`` prints a saved run again.

Without arguments: ``run --all``, which is what ``make bench`` does.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

from bench.goals import judge
from bench.report import figures, render
from bench.run import run
from bench.targets import DEFAULTS, Target, parse
from tenure.cli.bench_client import TABLE

NAMES = [row[0] for row in TABLE]
RESULTS = Path(__file__).parent / "results"


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("run", help="measure workloads on targets, print both tables, save the run")
    measure.add_argument(
        "--all", action="store_true", help="every workload, every target found here, start, memory, step"
    )
    measure.add_argument("--workloads", default="W1,W3", help=f"of {','.join(NAMES)} (default W1,W3)")
    measure.add_argument("--targets", default=",".join(DEFAULTS), help="KIND[:VARIANT] or [NAME=]URL, comma-separated")
    measure.add_argument("--reps", type=int, default=3, help="repetitions, medians of which are shown (default 3)")
    measure.add_argument("--solo", action="store_true", help="compare W6 with solo runs for the peers too")
    measure.add_argument("--out", type=Path, default=None, help="where to save (default bench/results/TIME.json)")
    show = commands.add_parser("show", help="print the tables of a saved run")
    show.add_argument("results", type=Path)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run; 0 when no goal that could be judged was missed, 1 when one was, 2 for a wrong command line."""
    given = sys.argv[1:] if argv is None else argv
    options = arguments().parse_args(given or ["run", "--all"])
    if options.command == "show":
        results = json.loads(options.results.read_text())
    else:
        names = NAMES if options.all else options.workloads.split(",")
        unknown = [name for name in names if name not in NAMES]
        try:
            targets = parse(options.targets)
        except ValueError as wrong:
            print(wrong, file=sys.stderr)
            return 2
        if unknown or options.reps < 1:
            print(f"unknown workloads {unknown}; known: {NAMES}" if unknown else "--reps must be ≥ 1", file=sys.stderr)
            return 2
        out = options.out or RESULTS / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
        results = run(targets, names, out, repetitions=options.reps, all_solo=options.solo, steps=options.all)
    print(render(results))
    kept = [Target(**entry) for entry in results["targets"]]
    verdicts = judge(kept, figures(results["measurements"]))
    return int(any(v.word == "MISS" for v in verdicts if v.ratio is not None and not math.isnan(v.ratio)))


if __name__ == "__main__":
    sys.exit(main())
