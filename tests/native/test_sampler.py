"""The sampler: known-answer vectors, a numpy reference, distributions, and what must never be chosen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from tenure import _native

Floats = NDArray[np.float32]
Masks = NDArray[np.int32]


@dataclass(frozen=True)
class Ask:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    position: int = 0
    stream: int = 0
    min_p: float = 0.0


def sample(
    logits: Floats, asks: list[Ask], threads: int = 1, masks: Masks | None = None, mask_of: Masks | None = None
) -> list[int]:
    """One token per ask; one row of logits serves all asks, or each its own."""
    rows = np.ascontiguousarray(np.broadcast_to(logits, (len(asks), logits.shape[-1])), np.float32)
    tokens: list[int] = _native.sample(
        rows,
        np.array([a.temperature for a in asks], np.float32),
        np.array([a.top_p for a in asks], np.float32),
        np.array([a.top_k for a in asks], np.int32),
        np.array([a.seed for a in asks], np.uint64),
        np.array([a.position for a in asks], np.uint32),
        np.array([a.stream for a in asks], np.uint32),
        threads,
        np.array([a.min_p for a in asks], np.float32),
        masks,
        mask_of,
    ).tolist()
    return tokens


def philox(counter: list[int], key: list[int]) -> list[int]:
    words: list[int] = _native.philox4x32(np.array(counter, np.uint32), np.array(key, np.uint32)).tolist()
    return words


def kept_probabilities(logits: Floats, ask: Ask) -> NDArray[np.float64]:
    """Temperature, then min_p, top_k and top_p, each of what is left; equal logits rank by lower id. Zero where cut."""
    order = np.argsort(-logits.astype(np.float64), kind="stable")
    scaled = logits.astype(np.float64) / ask.temperature
    p = np.exp(scaled - scaled.max())
    p[p < ask.min_p] = 0
    if 0 < ask.top_k < len(p):
        p[order[ask.top_k :]] = 0
    p /= p.sum()
    if ask.top_p < 1:
        running = np.cumsum(p[order])
        p[order[np.searchsorted(running, ask.top_p) + 1 :]] = 0
    return p / p.sum()


def reference(logits: Floats, ask: Ask) -> int:
    """Walks the kept tokens in order of ids up to the row's own uniform."""
    u = philox([ask.position, ask.stream, 0, 0], [ask.seed & 0xFFFFFFFF, ask.seed >> 32])[0] * 2.0**-32
    running = np.cumsum(kept_probabilities(logits, ask))
    return int(np.searchsorted(running, u * running[-1], side="right"))


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    """The vectors of the Random123 distribution."""
    assert philox(counter, key) == words


def test_greedy_takes_the_lowest_index_of_the_maximum() -> None:
    rng = np.random.default_rng(0)
    for vocab in (1, 2, 255, 256, 257, 5000):
        logits = rng.integers(-3, 4, vocab).astype(np.float32)  # many ties
        for ask in (Ask(temperature=0), Ask(top_k=1), Ask(temperature=1e-40), Ask(temperature=0, top_p=0.5, top_k=3)):
            assert sample(logits, [ask]) == [int(np.argmax(logits))]
    assert sample(np.array([-5, -0.0, 0.0, -1], np.float32), [Ask(temperature=0)]) == [1]
    assert sample(np.array([-7, -3, -3, -9], np.float32), [Ask(temperature=0)]) == [1]


@pytest.mark.parametrize("vocab", [7, 256, 1000, 49152])
def test_equals_the_reference_token_by_token(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal(vocab) * 3).astype(np.float32)
    asks = [
        Ask(float(t), float(p), int(k), int(rng.integers(2**63)), int(rng.integers(2**31)), int(rng.integers(8)))
        for t in (0.3, 1.0, 1.7)
        for p in (1.0, 0.95, 0.5, 0.01)
        for k in (0, 2, 40, 5000)
        for _ in range(3)
    ]
    assert sample(logits, asks, threads=2) == [reference(logits, ask) for ask in asks]


def test_distribution_matches_by_chi_square() -> None:
    logits = np.array([0.0, 1.0, 2.0, -1.0, 1.0, 0.5, -np.inf, 2.0], np.float32)
    count = 20000
    for ask in (Ask(), Ask(temperature=0.7), Ask(top_k=4), Ask(top_p=0.8), Ask(temperature=1.5, top_k=5, top_p=0.9)):
        asks = [Ask(ask.temperature, ask.top_p, ask.top_k, seed=11, position=i) for i in range(count)]
        seen = np.bincount(sample(logits, asks), minlength=len(logits))
        expected = kept_probabilities(logits, ask) * count
        assert (seen[expected == 0] == 0).all()
        live = expected > 0
        chi = ((seen[live] - expected[live]) ** 2 / expected[live]).sum()
        assert chi < 26.0  # 99.9 % of chi-square with 7 degrees of freedom is 24.3; seeds are fixed


def test_seed_position_and_stream_each_matter_and_nothing_else() -> None:
    logits = np.zeros(4096, np.float32)
    asks = [Ask(seed=s, position=p, stream=n) for s in (0, 1, 2**32, 2**63) for p in (0, 1) for n in (0, 1)]
    alone = [sample(logits, [ask])[0] for ask in asks]
    assert len(set(alone)) == len(asks)
    assert sample(logits, asks, threads=2) == alone
    assert sample(logits, asks[::-1]) == alone[::-1]


def test_ties_at_a_cut_go_to_the_lower_id() -> None:
    logits = np.array([1, 5, 1, 5, 5, 0], np.float32)
    many = [Ask(seed=s) for s in range(300)]
    assert set(sample(logits, [Ask(top_k=2, seed=a.seed) for a in many])) == {1, 3}
    assert set(sample(logits, [Ask(top_p=0.4, seed=a.seed) for a in many])) == {1, 3}
    assert set(sample(np.zeros(600, np.float32), [Ask(top_k=3, seed=a.seed) for a in many])) == {0, 1, 2}


def test_cuts_in_a_flat_and_in_a_steep_row() -> None:
    flat = np.zeros(5000, np.float32)
    assert max(sample(flat, [Ask(top_p=0.1, seed=s) for s in range(200)])) < 500
    steep = np.zeros(5000, np.float32)
    steep[1234] = 1e30
    assert set(sample(steep, [Ask(top_p=0.999, top_k=k, seed=s) for s in range(20) for k in (0, 50)])) == {1234}
    huge = np.array([3e38, -3e38, 2.9e38], np.float32)
    assert set(sample(huge, [Ask(seed=s) for s in range(20)])) == {0}


def test_a_row_that_is_not_finite_gives_minus_one_and_spares_the_others() -> None:
    logits = np.zeros((6, 300), np.float32)
    logits[:, 7] = 1
    logits[0, 299] = np.nan
    logits[1, 5] = np.inf
    logits[2, 3] = -np.float32(np.nan)
    logits[3, :] = -np.inf
    logits[5, 8] = -np.inf  # a token that is banned is no error
    for ask in (
        Ask(temperature=0),
        Ask(temperature=0.01),
        Ask(temperature=0.01, top_k=5),
        Ask(temperature=0.01, top_p=0.9),
    ):
        assert sample(logits, [ask] * 6) == [-1, -1, -1, -1, 7, 7]


def test_banned_tokens_are_never_chosen() -> None:
    logits = np.full(1000, -np.inf, np.float32)
    logits[[10, 900]] = 0
    for ask in (Ask(), Ask(top_k=5), Ask(top_p=0.99)):
        assert set(sample(logits, [Ask(1.0, ask.top_p, ask.top_k, seed=s) for s in range(100)])) == {10, 900}


def test_min_p_keeps_what_is_likely_enough() -> None:
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal(5000) * 3).astype(np.float32)
    asks = [
        Ask(t, p, k, int(rng.integers(2**63)), min_p=float(m))
        for t in (0.5, 1.0)
        for p in (1.0, 0.8)
        for k in (0, 3)
        for m in (0.001, 0.05, 0.3, 1.0)
        for _ in range(4)
    ]
    assert sample(logits, asks) == [reference(logits, ask) for ask in asks]
    best = int(np.argmax(logits))
    assert sample(logits, [Ask(min_p=1.0), Ask(temperature=0, min_p=0.1)]) == [best, best]


def bits_of(allowed: NDArray[np.bool_]) -> Masks:
    """Masks as the sampler takes them; what is beyond the vocabulary is set, and must not matter."""
    rows, vocab = allowed.shape
    room = np.ones((rows, -(-vocab // 32) * 32), np.bool_)
    room[:, :vocab] = allowed
    return np.packbits(room, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000, 49152])
def test_what_is_not_allowed_is_as_if_it_could_never_come(vocab: int) -> None:
    """The same tokens as from logits of minus infinity, whether few, half, nearly all or all may be chosen."""
    rng = np.random.default_rng(vocab)
    logits = np.round(rng.standard_normal((24, vocab)) * 3, 1).astype(np.float32)  # with ties
    share = np.array([0.001, 0.03, 0.5, 0.98, 1.0, 1.0])
    allowed = rng.random((6, vocab)) < share[:, None]
    allowed[:, rng.integers(vocab)] = True
    mask_of = np.arange(24, dtype=np.int32) % 7 - 1
    asks = [
        Ask((0.0, 0.7, 1.3)[r % 3], (1.0, 0.9)[r % 2], (0, 0, 40)[r // 8], seed=r, min_p=(0.0, 0.01)[r // 2 % 2])
        for r in range(24)
    ]
    never = logits.copy()
    for row, at in zip(never, mask_of.tolist(), strict=True):
        if at >= 0:
            row[~allowed[at]] = -np.inf
    assert sample(logits, asks, 2, bits_of(allowed), mask_of) == sample(never, asks)


def test_a_row_that_may_choose_nothing_gives_minus_one() -> None:
    logits = np.zeros((4, 70), np.float32)
    logits[2, 5] = logits[3, 66] = np.nan
    allowed = np.zeros((2, 70), np.bool_)
    allowed[1, 66] = True
    mask_of = np.array([0, 1, 1, 1], np.int32)
    for ask in (Ask(), Ask(temperature=0)):
        assert sample(logits, [ask] * 4, 1, bits_of(allowed), mask_of) == [-1, 66, 66, -1]


def test_wrong_masks_are_refused_by_name() -> None:
    logits = np.zeros(40, np.float32)
    masks, of = np.zeros((2, 2), np.int32), np.zeros(1, np.int32)
    for wrong_masks, wrong_of, message in (
        (masks, None, "masks need mask_of"),
        (None, of, "masks need mask_of"),
        (np.zeros((2, 1), np.int32), of, "a bit for each token"),
        (masks, of + 2, "mask_of must be -1 or a row of masks"),
        (masks, of - 2, "mask_of must be -1 or a row of masks"),
        (masks, np.zeros(2, np.int32), "mask_of must have one value per row"),
    ):
        with pytest.raises(ValueError, match=message):
            sample(logits, [Ask()], 1, wrong_masks, wrong_of)
    for min_p in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="min_p must be"):
            sample(logits, [Ask(min_p=min_p)])


def test_wrong_arguments_are_refused_by_name() -> None:
    logits = np.zeros(10, np.float32)
    for ask, message in (
        (Ask(temperature=-1), "temperature must be >= 0"),
        (Ask(temperature=float("nan")), "temperature must be >= 0"),
        (Ask(top_p=0), r"top_p must be in \(0, 1\]"),
        (Ask(top_p=1.5), r"top_p must be in \(0, 1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            sample(logits, [ask])
    with pytest.raises(ValueError, match="seed must have one value per row"):
        _native.sample(
            np.zeros((1, 4), np.float32),
            np.ones(1, np.float32),
            np.ones(1, np.float32),
            np.zeros(1, np.int32),
            np.zeros(2, np.uint64),
            np.zeros(1, np.uint32),
            np.zeros(1, np.uint32),
        )
