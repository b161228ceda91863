"""Types of the C++ module (native/bind*.cpp)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
Table = tuple[I32, I32, I64, U8, I64, U8]
"""starts, first_block, offsets, codecs, encode_to, encode_codec"""
Weights = NDArray[np.float32] | NDArray[np.uint16] | NDArray[np.int8] | NDArray[np.uint8]

def isa() -> str: ...
def isas() -> list[str]: ...
def cpu_features() -> list[str]: ...
def cores() -> int: ...

class Linear:
    def __init__(self, format: str, w: Weights, scale: U16 | None = None, min: U16 | None = None) -> None: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def nbytes(self) -> int: ...
    def dequantise(self) -> F32: ...
    def forward(self, x: F32, threads: int = 1, isa: str = "", bias: F32 | None = None, fine: bool = False) -> F32: ...
    def forward_into(
        self, x: F32, y: F32, threads: int = 1, isa: str = "", bias: F32 | None = None, accumulate: bool = False,
        fine: bool = False,
    ) -> None: ...  # fmt: skip

class Decoder:
    def __init__(
        self,
        *,
        layers: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        ffn: int,
        vocab: int,
        inv_freq: F32,
        rms_eps: float = 1e-5,
        rope_of_layer: I32 = ...,
        rope_scale: float = 1.0,
        windows: I32 = ...,
        norms: str = "before",
        qk_norm: str = "none",
        activation: str = "silu",
        attention_scale: float = ...,
        attention_cap: float = 0.0,
        logit_cap: float = 0.0,
        embedding_scale: float = 1.0,
        residual_scale: float = 1.0,
        logit_scale: float = 1.0,
        kv_codec: str = "bf16",
        threads: int = 0,
        isa: str = "",
    ) -> None: ...
    def set_linear(
        self,
        name: str,
        format: str,
        w: Weights,
        scale: U16 | None = None,
        min: U16 | None = None,
        bias: F32 | None = None,
    ) -> None: ...
    def set_norm(self, name: str, weight: F32) -> None: ...
    def set_embedding(self, format: str, w: Weights, scale: U16 | None = None, min: U16 | None = None) -> None: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def last_times(self) -> dict[str, float]: ...
    def step(
        self,
        arena: U8,
        tokens: I32,
        seq_rows: I32,
        first_pos: I32,
        tables: Sequence[Table],
        logit_rows: I32,
        logits: F32,
    ) -> None: ...

def sample(
    logits: F32,
    temperature: F32,
    top_p: F32,
    top_k: I32,
    seed: NDArray[np.uint64],
    position: NDArray[np.uint32],
    stream: NDArray[np.uint32],
    threads: int = 1,
    min_p: F32 | None = None,
    masks: I32 | None = None,
    mask_of: I32 | None = None,
) -> I32: ...
def philox4x32(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]: ...
def prefault(arena: U8, begin: int, end: int) -> None: ...
def copy_blocks(arena: U8, src: I64, dst: I64, nbytes: int) -> None: ...
def recode(
    arena: U8,
    src: I64,
    src_codec: str,
    dst: I64,
    dst_codec: str,
    layers: int,
    kv_heads: int,
    head_dim: int,
    isa: str = "",
) -> None: ...
def block_bytes(codec: str, layers: int, kv_heads: int, head_dim: int) -> int: ...
def attention(
    arena: U8,
    staged: str,
    isa: str,
    threads: int,
    q: F32,
    k: F32,
    v: F32,
    seq_rows: I32,
    first_pos: I32,
    table: Table,
    out: F32,
    window: int = ...,
    soft_cap: float = 0.0,
) -> None: ...
def exercise_team(threads: int, regions: int, fail_at: int = -1) -> None: ...
def exercise_nesting(threads: int) -> None: ...
