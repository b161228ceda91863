"""What a guide costs: ``python -m bench.guided``. Milliseconds per token of guided and of plain answers, turn by turn.

Both kinds give exactly so many tokens after the same prompts, from one engine; the guide is compiled before. Each
repetition runs one of each kind, so that both meet the same machine, with a seed of its own; the figures are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import uuid
from collections.abc import Sequence

from tenure import Engine
from tenure.types import Guide, Request, Sampling

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3},
        "count": {"type": "integer"},
        "kind": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "items": {"type": "array", "minItems": 100, "items": ITEM}},
    "required": ["title", "items"],
    "additionalProperties": False,
}
"""Too long for any answer here to end by itself."""
KINDS: dict[str, Guide | None] = {
    "plain": None,
    "json": Guide("json_schema", json.dumps(SCHEMA)),
    "regex": Guide("regex", r"([A-Z][a-z]{2,9} [a-z]{2,9} [0-9]{1,4}[.] ){100,200}"),
}
MOST = 0.10
"""How much slower tokens may come."""


def per_token_ms(engine: Engine, guide: Guide | None, sequences: int, tokens: int, seed: int = 0) -> float:
    """Milliseconds between two tokens of `sequences` answers side by side, answers to one prompt: so all of them begin
    in the same step, and what one of them costs before its first token is not in the figure."""
    ids = engine.encode("List things that are often found in a kitchen, as JSON:")
    sampling = Sampling(temperature=0.8, seed=seed, max_tokens=tokens, guide=guide, ignore_eos=guide is None)
    name = uuid.uuid4().hex
    handle = engine.submit(Request(name, tuple(ids), engine.scope(tenant="", salt=name), sampling, sequences))
    _, done = handle.result()
    if done.timings.predicted_n != sequences * tokens or done.error is not None:
        raise RuntimeError(f"{done.timings.predicted_n} of {sequences} times {tokens} tokens: {done.error}")
    return done.timings.predicted_ms / tokens


def compare(engine: Engine, sequences: int, tokens: int, repeat: int) -> dict[str, float]:
    """Median milliseconds per token of each kind."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for seed in range(1, repeat + 1):
        for kind, guide in KINDS.items():
            found[kind].append(per_token_ms(engine, guide, sequences, tokens, seed))
    return {kind: statistics.median(times) for kind, times in found.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a .gguf file, a directory or a hub id; the embedded model without")
    parser.add_argument("--sequences", default="1,4,16", help="how many at once")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=5)
    asked = parser.parse_args(arguments)
    worst = 0.0
    with Engine.load(asked.model) as engine:
        for guide in KINDS.values():
            if guide is not None:
                engine.check_guide(guide)
        per_token_ms(engine, None, 2, 16)
        for sequences in map(int, asked.sequences.split(",")):
            found = compare(engine, sequences, asked.tokens, asked.repeat)
            for kind, ms in found.items():
                slower = ms / found["plain"] - 1
                worst = max(worst, slower)
                print(f"{sequences:>3} at once  {kind:<6} {ms:7.2f} ms per token  {100 * slower:+6.1f} %")
    print(f"guided tokens come at most {100 * worst:.1f} % slower; {100 * MOST:.0f} % are allowed")
    return 1 if worst > MOST else 0


if __name__ == "__main__":
    raise SystemExit(main())
