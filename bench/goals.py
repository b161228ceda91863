"""The speeds Tenure owes (issue A, "How fast"): each a figure of ours over the best peer's of the same run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from bench.targets import Target

Figures = dict[tuple[str, str, str], float]  # (target, workload, figure) -> median; NaN where it failed
Chosen = tuple[str, float]  # a target's name and its figure


@dataclass(frozen=True, slots=True)
class Goal:
    """One line of the table. `better` says which way; `least` and `aim` are ratios to the best peer, or, when `peers`
    is None, absolute figures. `ours` and `peers` name the precision of weights that may take part (None: any)."""

    title: str
    workload: str
    figure: str
    better: Literal["more", "less"]
    least: float
    aim: float
    ours: str | None = None
    peers: Callable[[Target], bool] | None = lambda target: True


def _llamacpp_4bit(target: Target) -> bool:
    return target.kind == "llamacpp" and target.precision == "4-bit"


def _bf16(target: Target) -> bool:
    return target.precision == "bf16"


GOALS = (
    Goal("W1 decode tok/s, 4-bit weights", "W1", "decode_tps", "more", 1.5, 2.0, "4-bit", _llamacpp_4bit),
    Goal("W1 decode tok/s, bf16 weights", "W1", "decode_tps", "more", 1.3, 1.7, "bf16", _bf16),
    Goal("W1 prefill tok/s, any format", "W1", "prefill_tps", "more", 1.1, 1.5),
    Goal("W2 time to first token", "W2", "ttft_s", "less", 1.0, 0.75),
    Goal("W3 output tok/s, bf16 weights", "W3", "output_tps", "more", 1.2, 1.8, "bf16"),
    Goal("W3 output tok/s, 4-bit weights", "W3", "output_tps", "more", 1.4, 1.8, "4-bit"),
    Goal("W4 wall, prefix cache on", "W4", "wall_s", "less", 0.7, 0.5),
    Goal("W5 mean time to first token, turn 6", "W5", "ttft_sixth_s", "less", 0.6, 0.35),
    Goal("W6 wall, all texts equal to solo runs", "W6", "wall_s", "less", 0.8, 0.55),
    Goal("Python and scheduling share, 16 sequences", "step", "python_share", "less", 0.08, 0.03, peers=None),
    Goal("start to ready, embedded model, s", "start", "ready_s", "less", 3.0, 1.0, "4-bit", peers=None),
    Goal("RSS above weights, arena, staging, MiB", "memory", "overhead_mib", "less", 250.0, 120.0, peers=None),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A goal and what came of it. `ratio` is the absolute figure for a goal without peers; None: not measured."""

    goal: Goal
    ours: Chosen | None
    peer: Chosen | None
    ratio: float | None

    @property
    def word(self) -> str:
        """``aim``, ``pass``, ``MISS``, or ``–`` when one of the two sides was not measured."""
        if self.ratio is None:
            return "–"
        reached = {"more": self.ratio.__ge__, "less": self.ratio.__le__}[self.goal.better]
        return "aim" if reached(self.goal.aim) else "pass" if reached(self.goal.least) else "MISS"


def judge(targets: Sequence[Target], figures: Figures) -> list[Verdict]:
    """Hold every goal against the figures of one run."""
    return [_judge(goal, targets, figures) for goal in GOALS]


def _judge(goal: Goal, targets: Sequence[Target], figures: Figures) -> Verdict:
    mine = [t for t in targets if t.ours and goal.ours in (None, t.precision)]
    ours = _best(goal, mine, figures)
    if goal.peers is None:
        return Verdict(goal, ours, None, ours[1] if ours else None)
    peer = _best(goal, [t for t in targets if not t.ours and goal.peers(t)], figures)
    return Verdict(goal, ours, peer, ours[1] / peer[1] if ours and peer else None)


def _best(goal: Goal, among: Sequence[Target], figures: Figures) -> Chosen | None:
    """The best of those that were measured; a goal without peers is owed by the worst of ours."""
    found = [(t.name, figures.get((t.name, goal.workload, goal.figure), math.nan)) for t in among]
    found = [chosen for chosen in found if not math.isnan(chosen[1])]
    highest = (goal.better == "more") == (goal.peers is not None)
    return (max if highest else min)(found, key=lambda chosen: chosen[1]) if found else None
