"""Cases I1 (weights reloaded under the same name) and I3 (salts) of shared/cases. There are no adapters, so what
a reload of one must not share is left out; that a scope names its adapter is tested in tests/core."""

from __future__ import annotations

from tests.e2e.support import Running, prompt_ids, serving

from tenure.engine import Engine, EngineSettings
from tenure.models import find_default, load

PROMPT = prompt_ids(100, seed=31)


def test_i1_other_weights_under_the_same_name_share_nothing() -> None:
    answers = {}
    for weights in ("auto", "f32"):
        with serving("--weights", weights, "--served-model-name", "same") as server:
            cold = server.complete(PROMPT, 12)
            warm = server.complete(PROMPT, 12)
            assert cold["kv"]["cached_tokens"] == 0
            assert warm["kv"]["cached_tokens"] == len(PROMPT) - 1
            assert warm["choices"] == cold["choices"]
            answers[weights] = cold["choices"][0]["text"]
    assert set(answers) == {"auto", "f32"}


def test_i1_the_fingerprint_names_what_computes_the_kv_not_the_public_name() -> None:
    scopes = []
    for weights in ("auto", "bf16"):
        model = load(str(find_default()), weights=weights)  # type: ignore[arg-type]
        with Engine(model, EngineSettings(served_name="same", kv_cache_bytes=64 << 20)) as engine:
            assert engine.card.id == "same"
            scopes.append(engine.scope(tenant="", salt=""))
    assert scopes[0] != scopes[1]
    assert scopes[0].fingerprint != scopes[1].fingerprint


def test_i3_a_salt_shares_with_itself_only(server: Running) -> None:
    server.reset()
    prompt = prompt_ids(97, seed=77)

    def reused(salt: str | None) -> int:
        extra = {} if salt is None else {"cache_salt": salt}
        return int(server.complete(prompt, 2, **extra)["kv"]["cached_tokens"])

    uses = [reused("X"), reused("X"), reused("Y"), reused(None), reused("smollm2"), reused(None), reused("smollm2")]
    assert uses == [0, 96, 0, 0, 0, 96, 96]


def test_i3_the_receipt_says_that_the_scope_was_another(server: Running) -> None:
    server.reset()
    prompt = prompt_ids(97, seed=78)
    server.complete(prompt, 2, cache_salt="first")
    answer = server.complete(prompt, 2, cache_salt="second")
    assert answer["kv"]["cached_tokens"] == 0
    assert answer["kv"]["miss"]["reason"] == "scope_changed"
