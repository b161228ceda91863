"""Settings: four sources in order, and errors that name the culprit and what would be accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure.cli.compose import PAIRS, codec_name
from tenure.config import SETTINGS, Settings, amount, is_loopback, resolve
from tenure.errors import ConfigError
from tenure.spec import CODECS


def test_defaults_need_nothing() -> None:
    resolved = resolve({}, {})
    assert resolved.settings == Settings()
    assert set(resolved.sources.values()) == {"default"}


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "tenure.toml"
    file.write_text('port = 1\nmax-num-seqs = 2\ngrace = 3.5\nhost = "127.0.0.3"\n')
    env = {"TENURE_PORT": "10", "TENURE_MAX_NUM_SEQS": "20"}
    resolved = resolve({"port": "100", "host": None}, env, file)
    settings = resolved.settings
    assert (settings.port, settings.max_num_seqs, settings.grace, settings.host) == (100, 20, 3.5, "127.0.0.3")
    assert [resolved.sources[name] for name in ("port", "max_num_seqs", "grace", "threads")] == [
        "flag",
        "environment",
        "file",
        "default",
    ]


@pytest.mark.parametrize(
    ("written", "expected"),
    [("24GiB", 24 * 2**30), ("24GB", 24 * 10**9), ("1.5 MiB", 3 * 2**19), ("4096", 4096), ("7b", 7), ("2tib", 2**41)],
)
def test_amounts_of_memory(written: str, expected: int) -> None:
    assert amount(written).resolve(10**15) == expected


def test_a_share_is_of_the_machine() -> None:
    assert amount("80%").resolve(1000) == 800
    assert str(amount(" 12.5% ")) == "12.5%"


@pytest.mark.parametrize("written", ["", "24G", "GiB", "-1GiB", "0", "0%", "101%", "1e9", "much", "0.4B", "٣GiB%"])
def test_wrong_amounts_show_what_is_accepted(written: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({"memory": written}, {})
    assert caught.value.param == "memory"
    assert "--memory" in str(caught.value)
    assert "GiB" in str(caught.value) or "100%" in str(caught.value)


@given(st.integers(1, 2**50))
def test_whole_bytes_survive(size: int) -> None:
    assert amount(str(size)).bytes == size


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("port", "65536", "from 0 to 65535"),
        ("port", "http", "whole number"),
        ("max_step_ms", "nan", "from 1"),
        ("max_step_ms", "fast", "number"),
        ("weights", "int44", "did you mean int4?"),
        ("kv_cache_dtype", "fp8", "auto, bf16, f32, int8, k8v4, int4"),
        ("host", "  ", "empty"),
        ("max_num_seqs", "0", "from 1"),
        ("max_body_bytes", "50%", "not a share"),
    ],
)
def test_wrong_values_are_named(name: str, value: str, words: str) -> None:
    for flags, env, origin in (
        ({name: value}, {}, "--" + name.replace("_", "-")),
        ({}, {f"TENURE_{name.upper()}": value}, f"TENURE_{name.upper()}"),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve(flags, env)
        assert caught.value.param == name
        assert origin in str(caught.value)
        assert words in str(caught.value)


def test_switches(tmp_path: Path) -> None:
    assert resolve({"insecure": True}, {}).settings.insecure is True
    assert resolve({}, {"TENURE_INSECURE": "yes"}).settings.insecure is True
    assert resolve({"insecure": False}, {"TENURE_INSECURE": "1"}).settings.insecure is False
    with pytest.raises(ConfigError, match="TENURE_INSECURE 'maybe': must be true or false"):
        resolve({}, {"TENURE_INSECURE": "maybe"})


def test_a_key_is_not_echoed() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({"api_key": " \t"}, {})
    assert "\t" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("prot = 1", "unknown setting 'prot'; did you mean port?"),
        ("[server]\nport = 1", "unknown setting 'server'"),
        ("port = ", "not valid TOML"),
        ("port = [1]", "expected a single value, not list"),
        ("port = true", "whole number"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "t.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"t\.toml") as caught:
        resolve({}, {}, file)
    assert words in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        resolve({}, {}, tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve({}, {}, tmp_path)


def test_two_budgets_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        resolve({"memory": "1GiB"}, {"TENURE_KV_CACHE_MEMORY_BYTES": "1GiB"})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org", "127.evil.org"])
def test_beyond_loopback_needs_a_key_or_insecure(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match="--api-key"):
        resolve({"host": host}, {})
    assert resolve({"host": host, "api_key": "k"}, {}).settings.host == host
    assert resolve({"host": host, "insecure": True}, {}).settings.host == host


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_loopback_needs_nothing(host: str) -> None:
    assert resolve({"host": host}, {}).settings.host == host


def test_a_near_miss_in_the_environment_is_told_and_strangers_are_left_alone() -> None:
    env = {"TENURE_MAX_NUM_SEQ": "3", "TENURE_SERVICE_HOST": "10.0.0.1", "TENURE_ISA": "auto"}
    (warning,) = resolve({}, env).warnings
    assert "TENURE_MAX_NUM_SEQ " in warning
    assert "TENURE_MAX_NUM_SEQS" in warning


def test_every_setting_says_what_it_is() -> None:
    assert len({setting.flag for setting in SETTINGS}) == len(SETTINGS)
    for setting in SETTINGS:
        assert setting.help.endswith("."), setting.name
        assert setting.shown, setting.name


@pytest.mark.parametrize(
    ("flags", "codec"),
    [
        ({}, "bf16"),
        ({"kv_cache_dtype": "int4"}, "int4"),
        ({"kv_cache_dtype_k": "int8", "kv_cache_dtype_v": "int4"}, "k8v4"),
        ({"kv_cache_dtype_k": "int8"}, "int8"),
        ({"kv_cache_dtype_v": "int4"}, "int4"),
        ({"kv_cache_dtype": "int8", "kv_cache_dtype_v": "int4"}, "k8v4"),
        ({"kv_cache_dtype": "f32", "kv_cache_dtype_k": "int8", "kv_cache_dtype_v": "int8"}, "int8"),
    ],
)
def test_k_and_v_may_be_chosen_apart(flags: dict[str, object], codec: str) -> None:
    assert codec_name(resolve(flags, {}).settings) == codec


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"kv_cache_dtype_k": "int4", "kv_cache_dtype_v": "int8"}, "k8v4 has them the other way round"),
        ({"kv_cache_dtype_k": "bf16", "kv_cache_dtype_v": "int4"}, "both K and V are quantised, or neither"),
        ({"kv_cache_dtype": "bf16", "kv_cache_dtype_v": "int8"}, r"k8v4 \(int8, int4\)"),
        ({"kv_cache_dtype_k": "f32", "kv_cache_dtype_v": "bf16"}, "K in f32 with V in bf16 makes no sense"),
    ],
)
def test_pairs_that_make_no_sense_are_refused_with_the_reason(flags: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        codec_name(resolve(flags, {}).settings)


def test_pairs_are_what_the_codecs_are_made_of() -> None:
    bits = {"bf16": 16, "f32": 32, "int8": 8, "int4": 4}
    assert set(PAIRS) == set(CODECS)
    for name, (k, v) in PAIRS.items():
        assert (CODECS[name].k_bits, CODECS[name].v_bits) == (bits[k], bits[v])
