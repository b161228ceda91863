"""Recoding under pressure, with the real model: nobody is paused, everyone is told, and exact requests stay exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.engine.harness import english, model, watched

from tenure.engine import EngineSettings
from tenure.engine.settings import plan_memory
from tenure.errors import ConfigError
from tenure.events import BlockGone, SequencePaused
from tenure.types import Fate


def test_recoding_keeps_everyone_running() -> None:
    prompts = [english(120, 300 * i) for i in range(4)]
    with watched(model(), blocks=26, pressure="recode:int4@60%,pause@100%", max_step_ms=1e9, canary_steps=1) as seen:
        done = seen.run(*[seen.ask(prompt, 60) for prompt in prompts])
        facts = seen.engine.facts.since(0)[0]
        assert all(end.error is None and end.usage.completion_tokens == 60 for end in done)
        assert any(isinstance(fact, BlockGone) and fact.fate is Fate.RECODED for fact in facts)
        assert not any(isinstance(fact, SequencePaused) for fact in facts)
        held = [end.receipt.codec for end in done]
        assert any(codecs.get("int4", 0) >= 32 for codecs in held)
        assert all(sum(codecs.values()) == 180 for codecs in held)


def test_an_exact_request_beside_recoded_ones_gets_the_same_bits() -> None:
    prompt = english(120)
    with watched(model()) as seen:
        alone = seen.ask(prompt, 60)
        seen.run(alone)
        expected = seen.trace(alone)
    with watched(model(), blocks=26, pressure="recode:int4@60%,pause@100%", max_step_ms=1e9, canary_steps=1) as seen:
        exact = replace(seen.ask(prompt, 60), exact=True)
        others = [seen.ask(english(120, 300 * i), 60) for i in range(1, 4)]
        done = seen.run(*others, exact)
        facts = seen.engine.facts.since(0)[0]
        assert any(isinstance(fact, BlockGone) and fact.fate is Fate.RECODED for fact in facts)
        assert seen.trace(exact) == expected
        assert done[-1].receipt.codec == {"bf16": 180}


def test_a_step_that_saves_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="saves nothing"):
        plan_memory(EngineSettings(kv_codec="int4", pressure="recode:int8@50%"), model().shape, 1 << 20)
