"""A model as memory sees it: its matrices, and what each kind of layer keeps of a sequence.

Shapes that Tenure cannot serve are described too: what a latent, a recurrent or a windowed layer holds is a fact of the
model, whoever runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tenure.spec import KvGeometry, LayerGroup

WEIGHT_FORMATS = ("auto", "f32", "bf16", "int8", "int4")
PANEL = 32
"""Rows packed side by side: a matrix is stored in whole panels."""
GROUP = 32
"""Quantised weights that share a scale."""


def packed_bytes(format: str, rows: int, columns: int) -> int:
    """Bytes of a matrix as the decoder packs it in `format` (f32, bf16, int8 or int4)."""
    groups = -(-columns // GROUP)
    row = {
        "f32": 4 * columns, "bf16": 4 * (-(-columns // 2)), "int8": groups * (GROUP + 2),
        "int4": groups * (GROUP // 2 + 4),
    }[format]  # fmt: skip
    return -(-rows // PANEL) * PANEL * row


@dataclass(frozen=True, slots=True)
class Matrix:
    """`count` matrices of one size, of which a token is multiplied by `used`: all but in a mixture of experts."""

    rows: int
    columns: int
    count: int = 1
    used: float = 1.0
    format: str = "bf16"
    """How `--weights auto` keeps it."""
    edge: bool = False
    """The embedding or the output matrix: int4 keeps their eight bits."""

    def kept_as(self, weights: str) -> str:
        """Its format under `--weights weights`."""
        if weights == "auto":
            return self.format
        return "int8" if weights == "int4" and self.edge else weights

    def nbytes(self, weights: str) -> int:
        """Of all of them, packed."""
        return self.count * packed_bytes(self.kept_as(weights), self.rows, self.columns)

    def read_bytes(self, weights: str) -> float:
        """What computing one token reads of them."""
        return self.used * packed_bytes(self.kept_as(weights), self.rows, self.columns)


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers that keep the same of a sequence: K and V in blocks, or a state of one size."""

    name: str
    layers: int
    geometry: KvGeometry | None = None
    """Of all its layers together; None when they keep no K and V."""
    window: int | None = None
    """Tokens that still count."""
    state_bytes: int = 0
    """Of one sequence, whatever its length."""

    def bytes_of(self, tokens: int, name: str) -> int:
        """Of a running sequence of `tokens` in codec `name`, its open block staged: what a window has left is gone."""
        if self.geometry is None:
            return self.state_bytes
        return self.state_bytes + replace(self.geometry, groups=(self.group,)).sequence_bytes(tokens, name)

    def shared_bytes(self, blocks: int, tokens: int, name: str) -> int:
        """Of the first `blocks` blocks that sequences of `tokens` have in common: none once windows have left some, and
        states are each sequence's own."""
        if self.geometry is None:
            return 0
        all_blocks = self.geometry.blocks(tokens)
        kept = self.group.held(all_blocks, self.geometry.block_tokens) == all_blocks
        return kept * min(blocks, all_blocks) * self.geometry.block_bytes(name)

    @property
    def group(self) -> LayerGroup:
        return LayerGroup(self.layers, self.window)


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Everything the planner knows of a model."""

    name: str
    architecture: str
    context_length: int
    kinds: tuple[Kind, ...]
    matrices: tuple[Matrix, ...]
    vector_bytes: int = 0
    """Of norms and biases."""
    attention: int = 0
    """Layers × query heads × size of a head: what attention multiplies for each pair of tokens."""
    served: KvGeometry | None = None
    """What Tenure's allocator cuts blocks by; None when Tenure cannot serve the model."""
    unserved: str = ""
    """Why not."""
    file_bytes: int = 0
    """Of a file that is not repacked."""

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Layers by what they see; those that use an earlier layer's K and V are taken to be like the others."""
        return tuple(kind.group for kind in self.kinds if kind.geometry) or (LayerGroup(1),)

    @property
    def parameters(self) -> int:
        return sum(m.count * m.rows * m.columns for m in self.matrices) + self.vector_bytes // 4

    @property
    def active(self) -> float:
        """Parameters that a token is multiplied by."""
        return sum(m.used * m.rows * m.columns for m in self.matrices)

    def weight_bytes(self, weights: str = "auto") -> int:
        """Bytes of all weights as loaded with `--weights weights`."""
        if self.file_bytes and weights == "auto":
            return self.file_bytes
        return sum(m.nbytes(weights) for m in self.matrices) + self.vector_bytes

    def read_bytes(self, weights: str = "auto") -> float:
        """Bytes of weights that computing one token reads."""
        read = sum(m.read_bytes(weights) for m in self.matrices)
        if self.file_bytes and weights == "auto":
            return read * self.file_bytes / max(1, sum(m.nbytes(weights) for m in self.matrices))
        return read


def merged(kinds: Sequence[Kind]) -> tuple[Kind, ...]:
    """Kinds of one layer each, put together where they are alike, in the order they come."""
    together: dict[object, Kind] = {}
    for kind in kinds:
        shape = kind.geometry and (kind.geometry.kv_heads, kind.geometry.head_dim, kind.geometry.v_dim)
        key = (kind.name, shape, kind.window)
        held = together.get(key)
        if held is None:
            together[key] = kind
            continue
        geometry = held.geometry and held.geometry.with_layers(held.layers + kind.layers)
        together[key] = Kind(
            kind.name, held.layers + kind.layers, geometry, kind.window, held.state_bytes + kind.state_bytes
        )
    return tuple(together.values())
