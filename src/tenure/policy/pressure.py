"""What is done when running sequences outgrow the pool."""

from __future__ import annotations

from collections.abc import Sequence

from tenure.policy.base import Load, Pause, Refuse, RunningView, Shortfall, Wait


class PauseYoungest:
    """The one that came last waits, among those of the least urgent priority; never the only one running."""

    name = "pause"

    def relieve(self, shortfall: Shortfall, running: Sequence[RunningView], load: Load) -> Pause | Wait | Refuse:
        if len(running) < 2:
            return Refuse(
                f"the only running sequence fills the pool: {shortfall.reason}",
                "kv_capacity_exceeded",
                {"needed_blocks": shortfall.needed, "pool_blocks": load.total_blocks},
            )
        helpful = [view for view in running if view.blocks_freed_if_paused] or running
        victim = max(helpful, key=lambda view: (view.priority, view.arrived, view.seq))
        return Pause(victim.seq, f"came last, frees {victim.blocks_freed_if_paused} blocks: {shortfall.reason}")
