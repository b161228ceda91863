"""The decoder's step against the oracle, and its row-invariance bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.native.support import ISAS, Tiny, make_decoder, plain_table

from tenure import _native
from tenure.device import reference

Floats = NDArray[np.float32]
TOKENS = np.random.default_rng(5).integers(0, 131, 600)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("weights", "codec", "tolerance"),
    [("f32", "f32", 2e-6), ("f32", "bf16", 2e-3), ("bf16", "bf16", 5e-3), ("int4", "bf16", 2e-2)],
)
def test_logits_agree_with_the_oracle(isa: str, weights: str, codec: str, tolerance: float) -> None:
    tiny = make_decoder(weights=weights, codec=codec, isa=isa, threads=2)
    slots = tiny.slots()
    got = tiny.step(slots, [(slots.take(80), TOKENS[:80])])[0]
    want = tiny.oracle.logits(TOKENS[:80])
    assert np.abs(got - want).max() <= tolerance * np.ptp(want)


@pytest.mark.parametrize(
    "shape",
    [
        {"tied": False, "bias": True},
        {"heads": 4, "kv_heads": 4, "head_dim": 16, "hidden": 64, "ffn": 96},
        {"heads": 3, "kv_heads": 1, "head_dim": 48, "hidden": 80, "ffn": 100, "vocab": 77},
    ],
)
def test_families_of_shapes(shape: dict[str, Any]) -> None:
    tiny = make_decoder(weights="f32", codec="f32", **shape)
    slots = tiny.slots()
    tokens = TOKENS[:70] % 77
    got = tiny.step(slots, [(slots.take(70), tokens)])[0]
    want = tiny.oracle.logits(tokens)
    assert np.abs(got - want).max() <= 2e-6 * np.ptp(want)


TWO_ROPES = (10000.0 ** (-np.arange(12) / np.array([[12], [6]]))).astype(np.float32)
FAMILIES: dict[str, dict[str, Any]] = {
    "windows": {"windows": [40, 0], "layers": 2},
    "after": {"norms": "after", "qk_norm": "whole"},
    "both": {"norms": "both", "qk_norm": "head", "activation": "gelu_tanh", "windows": [33, 0, 33], "layers": 3,
             "attention_scale": 0.3, "attention_cap": 5.0, "logit_cap": 3.0, "embedding_scale": 9.8,
             "inv_freq": TWO_ROPES, "rope_of_layer": [1, 0, 1]},
    "scales": {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 0.125, "attention_scale": 0.02},
    "rotation": {"inv_freq": TWO_ROPES[0], "rope_scale": 1.19, "rope_of_layer": [0, -1]},
}  # fmt: skip


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(isa: str, family: str) -> None:
    """Every option against the oracle, and a row's independence of its company with it."""
    one = make_decoder(weights="f32", codec="f32", isa=isa, threads=1, **FAMILIES[family])
    two = make_decoder(weights="f32", codec="f32", isa=isa, threads=2, **FAMILIES[family])
    want = one.oracle.logits(TOKENS[:150])
    got = chunked(one, [150])
    assert np.abs(got - want).max() <= 4e-6 * np.ptp(want)
    assert np.array_equal(chunked(two, [100] + [1] * 25 + [25], strangers=3, seed=1), got)


def test_rope_scale_multiplies_both_rotations() -> None:
    inv_freq = np.array([1.0, 0.1], np.float32)
    x = np.random.default_rng(0).standard_normal((3, 2, 4))
    at = np.arange(3)
    assert np.allclose(reference.rope(x, at, inv_freq, 2.0), 2.0 * reference.rope(x, at, inv_freq))


def chunked(tiny: Tiny, sizes: list[int], strangers: int = 0, seed: int = 0) -> Floats:
    """Logits of all tokens, computed in chunks of these sizes beside sequences that have nothing to do with them."""
    slots = tiny.slots(blocks=128, seed=seed)
    mine = slots.take(sum(sizes))
    others = [slots.take(60 + 3 * i) for i in range(strangers)]
    rng = np.random.default_rng(seed)
    if others:
        tiny.step(slots, [(other, rng.integers(0, 131, 20 + 3 * i)) for i, other in enumerate(others)])
    out, at = [], 0
    for size in sizes:
        place = len(others) // 2
        company = [(other, rng.integers(0, 131, 1)) for other in others]
        company.insert(place, (mine, TOKENS[at : at + size]))
        out.append(tiny.step(slots, company)[place])
        at += size
    return np.concatenate(out)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("weights", "codec"), [("bf16", "bf16"), ("int4", "bf16"), ("f32", "f32")])
def test_a_row_is_the_same_in_any_company(isa: str, weights: str, codec: str) -> None:
    one = make_decoder(weights=weights, codec=codec, isa=isa, threads=1)
    two = make_decoder(weights=weights, codec=codec, isa=isa, threads=2)
    want = chunked(one, [600])
    assert np.isfinite(want).all()
    assert np.array_equal(chunked(two, [600], seed=1), want)
    assert np.array_equal(chunked(two, [500] + [1] * 30 + [70], seed=2), want)
    assert np.array_equal(chunked(one, [7] * 10 + [530], seed=3), want)
    assert np.array_equal(chunked(two, [64] * 9 + [24], strangers=2, seed=4), want)
    assert np.array_equal(chunked(two, [580] + [1] * 20, strangers=15, seed=5), want)


def test_only_the_logits_asked_for_and_the_same() -> None:
    tiny = make_decoder()
    slots = tiny.slots()
    work = [(slots.take(50), TOKENS[:50]), (slots.take(9), TOKENS[:9])]
    every = tiny.step(slots, work)
    for sequence, _ in work:
        sequence.done = 0
    last = tiny.step(slots, work, last_only=True)
    assert all(np.array_equal(a[-1:], b) for a, b in zip(every, last, strict=True))


def test_sequences_may_share_what_they_only_read() -> None:
    tiny = make_decoder(threads=2)
    slots = tiny.slots()
    first = slots.take(96)
    tiny.step(slots, [(first, TOKENS[:64])])
    second = slots.take(96)
    second.table[:2] = first.table[:2]
    second.done = 64
    a, b = tiny.step(slots, [(first, TOKENS[64:80]), (second, TOKENS[64:80])])
    assert np.array_equal(a, b)


def test_a_step_without_logits_stores_keys_and_values() -> None:
    tiny = make_decoder()
    slots, again = tiny.slots(seed=1), tiny.slots(seed=1)
    sequence = slots.take(40)
    one = np.array([0, 40], np.int32)
    logits = np.empty((0, tiny.vocab), np.float32)
    tiny.native.step(
        slots.arena, TOKENS[:40].astype(np.int32), one, np.zeros(1, np.int32), [plain_table([sequence.table], "bf16")],
        np.empty(0, np.int32), logits,
    )  # fmt: skip
    tiny.step(again, [(again.take(40), TOKENS[:40])])
    assert np.array_equal(slots.arena, again.arena)


def test_last_times_add_up() -> None:
    tiny = make_decoder()
    slots = tiny.slots()
    tiny.step(slots, [(slots.take(40), TOKENS[:40])])
    times = tiny.native.last_times
    assert set(times) == {"linear_ms", "attention_ms", "lm_head_ms", "total_ms"}
    assert 0 < times["linear_ms"] + times["attention_ms"] + times["lm_head_ms"] < times["total_ms"]


def test_weight_bytes_are_those_of_the_packed_matrices() -> None:
    tied, untied = make_decoder(), make_decoder(tied=False)
    head = _native.Linear("bf16", np.zeros((131, 96), np.uint16)).nbytes
    assert 0 <= untied.native.weight_bytes - tied.native.weight_bytes - head < 4096
    assert tied.native.weight_bytes >= 2 * (131 * 96 + 2 * (320 * 96 + 96 * 192 + 320 * 96 + 96 * 160))


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return make_decoder()


COLUMNS = ("starts", "first_block", "offsets", "codecs", "encode_to", "encode_codec")


def argument_named(arguments: dict[str, Any], name: str) -> Any:
    """An argument, or a column of the only table."""
    if not name.startswith("tables."):
        return arguments[name]
    return arguments["tables"][0][COLUMNS.index(name.removeprefix("tables."))]


class TestArguments:
    """Every argument is checked before a byte is touched, and the message names it."""

    def arguments(self, tiny: Tiny) -> dict[str, Any]:
        size = tiny.native.block_bytes
        return {
            "arena": np.full(4 * size, 0xFF, np.uint8),
            "tokens": np.arange(40, dtype=np.int32),
            "seq_rows": np.array([0, 20, 40], np.int32),
            "first_pos": np.array([0, 30], np.int32),
            "tables": [plain_table([[0], [size, 3 * size]], "bf16")],
            "logit_rows": np.array([19, 39], np.int32),
            "logits": np.zeros((2, tiny.vocab), np.float32),
        }

    def test_good_ones_pass(self, tiny: Tiny) -> None:
        arguments = self.arguments(tiny)
        arguments["arena"][:] = 0
        tiny.native.step(**arguments)

    @pytest.mark.parametrize(
        ("name", "index", "value"),
        [
            ("tokens", 3, -1),
            ("tokens", 3, 131),
            ("seq_rows", 0, 1),
            ("seq_rows", 1, 41),
            ("seq_rows", 2, 39),
            ("first_pos", 0, -1),
            ("first_pos", 1, 2**31 - 1),
            ("first_pos", 0, 20),  # needs a second block
            ("tables.starts", 1, 4),
            ("tables.starts", 2, 2),
            ("tables.first_block", 0, -1),
            ("tables.first_block", 1, 1),  # the block of its first row is missing
            ("tables.offsets", 0, -1),
            ("tables.offsets", 2, 1 << 40),
            ("tables.offsets", 2, 0),  # written by both sequences
            ("tables.codecs", 1, 1),
            ("tables.codecs", 1, 2),  # rows are written to what is staged
            ("tables.codecs", 0, 99),
            ("tables.encode_to", 0, 128),  # not full
            ("logit_rows", 0, -1),
            ("logit_rows", 1, 40),
        ],
    )
    def test_bad_values(self, tiny: Tiny, name: str, index: int, value: int) -> None:
        arguments = self.arguments(tiny)
        argument_named(arguments, name)[index] = value
        named = "tables.starts" if (name, value) == ("first_pos", 20) else name
        with pytest.raises(ValueError, match=f"^{named}: "):
            tiny.native.step(**arguments)
        assert (arguments["arena"] == 0xFF).all()

    @pytest.mark.parametrize("name", ["seq_rows", "logits"])
    def test_bad_sizes(self, tiny: Tiny, name: str) -> None:
        arguments = self.arguments(tiny)
        arguments[name] = arguments[name][:-1].copy()
        with pytest.raises(ValueError, match=f"^{name}: "):
            tiny.native.step(**arguments)

    @pytest.mark.parametrize("name", ["tokens", "first_pos", "logits", "arena"])
    def test_bad_types(self, tiny: Tiny, name: str) -> None:
        arguments = self.arguments(tiny)
        arguments[name] = arguments[name].astype(np.float64)
        with pytest.raises(TypeError):
            tiny.native.step(**arguments)

    @pytest.mark.parametrize("column", range(6))
    def test_bad_tables(self, tiny: Tiny, column: int) -> None:
        arguments = self.arguments(tiny)
        table = arguments["tables"][0]
        for wrong, error in ((table[column][:-1], ValueError), (table[column].astype(np.float64), TypeError)):
            arguments["tables"] = [(*table[:column], wrong, *table[column + 1 :])]
            with pytest.raises(error, match="tables" if error is ValueError else None):
                tiny.native.step(**arguments)
        for tables in ([], [table, table]):
            with pytest.raises(ValueError, match=r"^tables: "):
                tiny.native.step(**arguments | {"tables": tables})

    def test_a_table_holds_what_a_window_sees(self) -> None:
        """The row at position 100 sees 40 tokens: from token 61 on, which lies in block 1."""
        tiny = make_decoder(windows=[40, 0])
        slots = tiny.slots()
        sequence = slots.take(101)
        tiny.step(slots, [(sequence, TOKENS[:100])])
        full, windowed = (plain_table([sequence.table + part], "bf16") for part in tiny.geometry.part_offsets("bf16"))
        logits = np.zeros((1, tiny.vocab), np.float32)

        def step(first: int, windowed: _native.Table) -> None:
            starts, _, *columns = windowed
            cut = (starts - np.array([0, first], np.int32), np.array([first], np.int32), *(c[first:] for c in columns))
            tiny.native.step(
                slots.arena, TOKENS[100:101].astype(np.int32), np.array([0, 1], np.int32), np.array([100], np.int32),
                [full, cut], np.zeros(1, np.int32), logits,
            )  # fmt: skip

        before = slots.arena.copy()
        with pytest.raises(ValueError, match=r"^tables\.first_block: block 2 is after token 61, .* sequence 0"):
            step(2, windowed)
        with pytest.raises(ValueError, match=r"^tables: "):
            tiny.native.step(**self.arguments(tiny))
        with pytest.raises(ValueError, match=r"^tables\.offsets: two blocks that are written overlap"):
            step(1, full)
        assert np.array_equal(slots.arena, before)
        step(1, windowed)
        assert np.array_equal(logits, tiny.step(slots, [(sequence, TOKENS[100:101])])[0])

    def test_missing_weights_are_named(self, tiny: Tiny) -> None:
        native = _native.Decoder(
            layers=1, hidden=64, heads=2, kv_heads=1, head_dim=32, ffn=64, vocab=10, inv_freq=np.ones(16, np.float32)
        )
        native.set_embedding("f32", np.zeros((10, 64), np.float32))
        with pytest.raises(ValueError, match="norm was never set"):
            native.step(**self.arguments(tiny) | {"logits": np.zeros((2, 10), np.float32)})

    @pytest.mark.parametrize("name", ["layers.2.qkv", "layers.x.qkv", "layers.0.q", "head", "layers.0"])
    def test_unknown_weights(self, tiny: Tiny, name: str) -> None:
        with pytest.raises(ValueError, match="no weight called"):
            tiny.native.set_linear(name, "f32", np.zeros((1, 1), np.float32))
        with pytest.raises(ValueError, match="no weight called"):
            tiny.native.set_norm(name, np.zeros(96, np.float32))

    def test_wrong_shapes(self, tiny: Tiny) -> None:
        with pytest.raises(ValueError, match=r"must be \[320, 96\]"):
            tiny.native.set_linear("layers.0.qkv", "f32", np.zeros((96, 320), np.float32))
        with pytest.raises(ValueError, match="must hold 96"):
            tiny.native.set_norm("norm", np.zeros(95, np.float32))
        with pytest.raises(ValueError, match="one value per row"):
            tiny.native.set_linear(
                "layers.0.qkv", "f32", np.zeros((320, 96), np.float32), bias=np.zeros(319, np.float32)
            )
        with pytest.raises(ValueError, match="must be uint16"):
            tiny.native.set_linear("layers.0.qkv", "bf16", np.zeros((320, 96), np.float32))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"threads": -1}, "threads"),
            ({"isa": "mmx"}, "mmx"),
            ({"kv_codec": "int3"}, "kv_codec"),
            ({"layers": 0}, "positive"),
            ({"heads": 3}, "heads"),
            ({"head_dim": 40}, "head_dim"),
            ({"colour": 1}, "colour"),
            ({"inv_freq": np.ones((1, 2, 4), np.float32)}, "inv_freq"),
            ({"inv_freq": np.ones(17, np.float32)}, "inv_freq"),
            ({"inv_freq": "fast"}, "inv_freq"),
            ({"norms": "around"}, "norms: unknown value 'around'"),
            ({"activation": "relu"}, "activation"),
            ({"windows": np.ones(2, np.int32)}, "windows"),
            ({"windows": np.full(1, -1, np.int32)}, "windows"),
            ({"rope_of_layer": np.ones(1, np.int32)}, "rope_of_layer"),
            ({"attention_cap": -1.0}, "attention_cap"),
        ],
    )
    def test_shapes_it_cannot_serve(self, change: dict[str, Any], message: str) -> None:
        sizes = {"layers": 1, "hidden": 64, "heads": 2, "kv_heads": 2, "head_dim": 32, "ffn": 64, "vocab": 10}
        shape: dict[str, Any] = {**sizes, "inv_freq": np.ones(16, np.float32)}
        with pytest.raises((ValueError, TypeError), match=message):
            _native.Decoder(**(shape | change))
