"""What is done as the blocks that running sequences lease outgrow the pool: an ordered ladder of steps.

    recode:int8@85%  above 85 % of the pool, the oldest blocks of someone are stored in fewer bits
    pause@95%        when growing would bring the leased blocks above 95 % of the pool, someone waits

Idle cached blocks are evictable whenever room is needed: they don't count, and evicting them is no step of the ladder.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tenure.errors import ConfigError
from tenure.policy.base import Load, Pause, PressurePolicy, Recode, Refuse, Relief, RunningView, Shortfall, Wait
from tenure.spec import CODECS

MIN_PROGRESS = 32
"""Tokens that a resumed sequence generates before it can be paused again."""


class PauseOne:
    """Someone waits: the least urgent, of those one whose tenant had most for its weight, of those the one that loses
    least work for the memory it frees. Never the only one running; and who was paused before gets some way first."""

    name = "pause"
    codecs: tuple[str, ...] = ()

    def limit(self, total_blocks: int) -> int:
        return total_blocks

    def start_limit(self, total_blocks: int) -> int:
        return total_blocks

    def relieve(self, shortfall: Shortfall, running: Sequence[RunningView], load: Load) -> Relief:
        if len(running) < 2:
            return Refuse(
                f"the only running sequence fills what it may: {shortfall.reason}",
                "kv_capacity_exceeded",
                {"needed_blocks": shortfall.needed, "pool_blocks": load.total_blocks},
            )
        moved = [view for view in running if not view.pauses or view.progress_since_resume >= MIN_PROGRESS] or running
        helpful = [view for view in moved if view.blocks_freed_if_paused] or moved
        victim = max(helpful, key=_expendable)
        lost, freed = victim.recompute_tokens, victim.blocks_freed_if_paused
        return Pause(victim.seq, f"loses {lost} tokens for {freed} blocks: {shortfall.reason}")


class RecodeOne:
    """Someone's oldest blocks are stored in fewer bits: whoever of those that have any would be paused first."""

    def __init__(self, codec: str) -> None:
        self.name = f"recode:{codec}"
        self.codecs: tuple[str, ...] = (codec,)

    def limit(self, total_blocks: int) -> int:
        return total_blocks

    def start_limit(self, total_blocks: int) -> int:
        return total_blocks

    def relieve(self, shortfall: Shortfall, running: Sequence[RunningView], load: Load) -> Relief:
        able = [view for view in running if view.recodable_blocks]
        if not able:
            return Wait("nobody has blocks that may be recoded")
        victim = max(able, key=_expendable)
        return Recode(victim.seq, self.codecs[0], max(1, shortfall.needed), shortfall.reason)


def _expendable(view: RunningView) -> tuple[float, ...]:
    """The highest goes first."""
    lost_per_block = view.recompute_tokens / max(1, view.blocks_freed_if_paused)
    return view.priority, view.served, -lost_per_block, view.arrived, view.seq


STEPS: Mapping[str, Callable[[], PressurePolicy]] = {PauseOne.name: PauseOne}
"""What a step of the ladder can do, by name."""
ABLE = tuple(known.name for known in CODECS.values() if not known.head_reusable)
"""Codecs that can be recoded to."""
FORMS = (
    f"steps are pause@PERCENT% and recode:CODEC@PERCENT% (CODEC is {', '.join(ABLE[:-1])} or {ABLE[-1]}), with rising"
    " thresholds, separated by commas, as in 'recode:int8@80%, pause@95%'"
)
_STEP = re.compile(r"(?P<name>[a-z]+)(?::(?P<codec>[a-z0-9]+))?(?:@(?P<percent>\d+(?:\.\d+)?)%)?")


@dataclass(frozen=True, slots=True)
class Step:
    """Above `share` of the pool, `policy` says what is done."""

    share: float
    policy: PressurePolicy

    def limit(self, total_blocks: int) -> int:
        """Leased blocks up to which it does nothing; rounded up, so that small pools can be used whole."""
        return math.ceil(self.share * total_blocks - 1e-9)


class Ladder:
    """Steps with rising thresholds; the first one that is due and knows what to do is taken."""

    def __init__(self, name: str, steps: Sequence[Step]) -> None:
        """`name`: as the operator wrote it. At least one step."""
        self.name = name
        self._steps = tuple(steps)
        self.codecs = tuple(dict.fromkeys(codec for step in self._steps for codec in step.policy.codecs))

    def limit(self, total_blocks: int) -> int:
        return self._steps[0].limit(total_blocks)

    def start_limit(self, total_blocks: int) -> int:
        waits = [step for step in self._steps if not step.policy.codecs]
        return waits[0].limit(total_blocks) if waits else total_blocks

    def relieve(self, shortfall: Shortfall, running: Sequence[RunningView], load: Load) -> Relief:
        leased = load.total_blocks - load.free_blocks - load.evictable_blocks + shortfall.needed
        verdict: Relief = Wait("no step is due")
        for step in self._steps:
            if leased > step.limit(load.total_blocks) or shortfall.is_hard:
                verdict = step.policy.relieve(shortfall, running, load)
                if isinstance(verdict, Recode):  # no more than brings the leased blocks below the threshold again
                    return replace(verdict, blocks=min(verdict.blocks, max(1, leased - step.limit(load.total_blocks))))
                if not isinstance(verdict, Wait):
                    return verdict
        return verdict


def ladder(text: str) -> Ladder:
    """Read `pause@95%`, or several steps with rising thresholds, separated by commas; without a threshold a step is due
    when the pool is full. ConfigError says which step is wrong, why, and what would be right."""
    steps: list[Step] = []
    for part in text.split(","):
        word = part.strip()
        found = _STEP.fullmatch(word)
        if found is None:
            raise _wrong(word, "is not of the form NAME@PERCENT%")
        share = float(found["percent"] or 100.0) / 100.0
        if not 0.0 < share <= 1.0:
            raise _wrong(word, "the threshold must be above 0% and at most 100%")
        if steps and share <= steps[-1].share:
            raise _wrong(word, "thresholds must rise from step to step")
        steps.append(Step(share, _policy(word, found["name"], found["codec"])))
    return Ladder(text.strip(), steps)


def _policy(word: str, name: str, codec: str | None) -> PressurePolicy:
    if name == "recode":
        if codec not in ABLE:
            raise _wrong(word, f"{codec!r} is no codec to recode to" if codec else "it does not say to which codec")
        return RecodeOne(codec)
    if name not in STEPS:
        raise _wrong(word, f"there is no step {name!r}")
    if codec is not None:
        raise _wrong(word, f"{name!r} takes no codec")
    return STEPS[name]()


def _wrong(word: str, why: str) -> ConfigError:
    return ConfigError("pressure", f"--pressure: step {word!r}: {why}; {FORMS}")
