"""A driver whose engine "generates" one token per step: the prompt's first, plus one each time."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench/drivers"))

from lines import Live, claim_stdout, serve


class Echo:
    def __init__(self) -> None:
        self.live: list[tuple[Live, int, int]] = []

    def add(self, live: Live, prompt: list[int], output: int) -> None:
        if not prompt:
            raise ValueError("empty prompt")
        self.live.append((live, prompt[0], output))

    def busy(self) -> bool:
        return bool(self.live)

    def step(self) -> list[Live]:
        for live, first, _ in self.live:
            live.take([first + len(live.ids)])
        over = [live for live, _, output in self.live if len(live.ids) == output]
        self.live = [entry for entry in self.live if len(entry[0].ids) < entry[2]]
        return over


if __name__ == "__main__":
    REPLIES = claim_stdout()
    print("noise of a library")
    serve(Echo(), "1.0", REPLIES)
