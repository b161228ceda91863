"""The gate finds what is broken, accepts what is good, and keeps its figures apart by model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.models.test_loader import random_model, save

from tenure import models
from tenure.cli import figures as shelf
from tenure.cli.gate import floor_of, gate
from tenure.config import resolve
from tenure.errors import ConfigError
from tenure.lab.gate import Floor, Quality, collapse, measure, repeats, shipped_text, text_id
from tenure.lab.probe import F32, Probe
from tenure.models.loader import Model


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return models.load(str(save(tmp_path_factory.mktemp("tiny"), random_model())))


class Forgetful(Probe):
    """A codec that stores nothing: what is read of a full block is zeros."""

    def feed(self, tokens: Any, *, last_only: bool = False) -> F32:
        logits = super().feed(tokens, last_only=last_only)
        if self._quantised:
            self.arena[:] = 0
        return logits


def test_the_text_is_long_and_of_many_kinds(tiny: Model) -> None:
    text = shipped_text()
    assert len(text) > 65_000
    for words in ("lighthouse", "def ", "| town |", "Mara:", "block"):
        assert words in text


def test_cached_in_pieces_equals_all_at_once(tiny: Model) -> None:
    tokens = np.random.default_rng(3).integers(2, 300, 96).tolist()
    for codec in ("bf16", "int8", "k8v4", "int4"):
        whole = Probe(tiny, codec, 1, 96).feed([tokens])
        probe = Probe(tiny, codec, 1, 96)
        parts = [probe.feed([tokens[:64]]), *(probe.feed([[token]]) for token in tokens[64:])]
        assert np.array_equal(whole, np.concatenate(parts))
    with pytest.raises(ValueError, match="open block"):
        probe = Probe(tiny, "int8", 1, 96)
        probe.feed([tokens[:10]])
        probe.feed([tokens[10:60]])


def test_codecs_in_order_and_a_broken_one_refused(tiny: Model) -> None:
    text = shipped_text()[:9000]
    found = measure(tiny, ["int8", "int4"], text, quick=True)
    assert list(found) == ["bf16", "int8", "int4"]
    assert found["bf16"].kl == 0.0
    assert found["bf16"].top1 == 1.0
    assert 0 <= found["int8"].kl < found["int4"].kl
    assert found["int8"].bits == 8.0 + 8 * 4 / (2 * tiny.shape.head_dim)
    assert Floor().misses(found["int8"]) == ""
    broken = measure(tiny, ["int8"], text, quick=True, make=Forgetful)["int8"]
    assert broken.kl > 10 * found["int8"].kl
    assert Floor(kl=5 * max(found["int8"].kl, 1e-6)).misses(broken) != ""


def test_everything_is_measured(tiny: Model) -> None:
    all_ = measure(tiny, ["int8"], shipped_text()[:3000])
    found, floor = all_["int8"], all_["bf16"].kl_of_one_bit
    assert floor is not None
    assert 0 < floor < found.kl  # weights that round little amplify little
    assert found.kl_of_one_bit is None
    assert found.retrieval is not None
    assert len(found.retrieval_by_depth) == 5
    assert found.collapse is not None
    assert 0 <= found.collapse <= 1


class Looping(Probe):
    """A codec after which the model says the same few words again and again."""

    def feed(self, tokens: Sequence[Sequence[int]], *, last_only: bool = False) -> F32:
        logits = super().feed(tokens, last_only=last_only)
        for row, new in zip(logits, tokens, strict=True):
            row[(new[-1] + 1) % 5] += 100.0
        return logits


def test_a_codec_that_makes_a_model_repeat_itself_is_refused(tiny: Model) -> None:
    text = shipped_text()[:3000]
    exact = replace(GOOD, collapse=collapse(tiny, "bf16", text, Probe))
    loops = replace(GOOD, collapse=collapse(tiny, "int8", text, Looping))
    assert (exact.collapse, loops.collapse) == (0.0, 1.0)
    assert "100% more of its runs end in repetition" in Floor().misses(loops, exact)
    assert Floor().misses(exact, exact) == ""


def test_a_short_text_is_refused_with_the_numbers(tiny: Model) -> None:
    with pytest.raises(ConfigError, match="at least 256"):
        measure(tiny, ["int8"], "too short", quick=True)


def test_repetition() -> None:
    assert repeats([5] * 300)
    assert repeats([1, 2, 3] * 100)
    assert repeats([*range(200), *([7, 8, 9, 10] * 30)])
    assert not repeats(list(range(300)))
    assert not repeats(np.random.default_rng(1).integers(0, 50, 300).tolist())


GOOD, BAD = Quality(8.25, 1, 20.0, 0.002, 0.95, tokens=9), Quality(4.5, 1, 90.0, 0.3, 0.5, tokens=9)


def test_the_floor_names_what_misses_it() -> None:
    assert Floor().misses(GOOD) == ""
    assert "KL 0.3000 above 0.025" in Floor().misses(BAD)
    assert "top-1 0.500 below 0.9" in Floor().misses(BAD)
    assert "KL" in Floor().misses(Quality(1, 1, 1, float("nan"), 1.0))
    exact, loops = Quality(16, 1, 1, 0, 1, collapse=0.1), Quality(8, 1, 1, 0, 1, collapse=0.6)
    assert "repetition" in Floor().misses(loops, exact)
    one, four = Quality(16, 1, 1, 0, 1, collapse=1 / 20), Quality(8, 1, 1, 0, 1, collapse=4 / 20)
    assert Floor().misses(four, one) == ""  # 15 % more, and no more than that


def settings_of(**flags: object) -> Any:
    return resolve(flags, {}).settings


@pytest.mark.parametrize("text", ["high", "0.1", "0.1,2", "-1,0.9", "0.1,0.9,3", "nan,0.9"])
def test_floors_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"0\.025,0\.90"):
        floor_of(settings_of(quality_floor=text))


def test_serving_is_refused_below_the_floor_and_the_nearest_codec_named(tiny: Model) -> None:
    text = text_id(shipped_text())
    shelf.keep(tiny.fingerprint, "tiny", text, {"int4": BAD, "k8v4": BAD, "int8": GOOD, "bf16": GOOD})
    with pytest.raises(ConfigError, match=r"KL 0\.3000 above 0\.025.*nearest codec that passes is int8 \(KL 0\.0020"):
        gate(tiny, "int4", settings_of(), lambda stage, share: None)
    assert "KL 0.0020, top-1 0.950" in gate(tiny, "int8", settings_of(), lambda stage, share: None)
    assert "KL 0.3000" in gate(tiny, "int4", settings_of(quality_floor="0.5,0.4"), lambda stage, share: None)
    assert "not measured" in gate(tiny, "int4", settings_of(quality_gate=False), lambda stage, share: None)
    assert gate(tiny, "bf16", settings_of(), lambda stage, share: None) == "exact"


def test_figures_of_another_version_are_measured_again(
    tiny: Model, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.keep(tiny.fingerprint, "tiny", "t", {"int8": GOOD})
    monkeypatch.setattr("tenure.__version__", "9.9")
    assert shelf.stored(tiny.fingerprint, "t") == {}
    assert "another version of Tenure" in capsys.readouterr().err
    shelf.keep(tiny.fingerprint, "tiny", "t", {"int4": BAD})
    assert shelf.stored(tiny.fingerprint, "t") == {"int4": BAD}


def test_figures_of_another_model_are_not_used(tiny: Model, capsys: pytest.CaptureFixture[str]) -> None:
    place = shelf.keep(tiny.fingerprint, "tiny", "t", {"int8": GOOD})
    assert shelf.stored(tiny.fingerprint, "t") == {"int8": GOOD}
    assert shelf.stored(tiny.fingerprint, "another text") == {}
    place.write_text(json.dumps(json.loads(place.read_text()) | {"fingerprint": "other"}))
    assert shelf.stored(tiny.fingerprint, "t") == {}
    assert "another model (other)" in capsys.readouterr().err
    for text in ("", "[]", '{"fingerprint": 1}', "{"):
        place.write_text(text)
        assert shelf.stored(tiny.fingerprint, "t") == {}
