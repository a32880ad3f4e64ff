"""Where a model under construction gets its weights from, and which of them are used as one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.kernel_set import ModelKernels
from engine.weights import Weights
from kernels.grouped import GroupedMatrix


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of the matrix `stored` of that shape, or their transpose; of a quantized one, of what it stands for."""

    stored: str
    shape: tuple[int, int]
    rows: range
    transposed: bool = False

    @property
    def num_out(self) -> int:
        return self.shape[1] if self.transposed else len(self.rows)

    @property
    def num_in(self) -> int:
        return len(self.rows) if self.transposed else self.shape[1]

    def of(self, weights: Weights) -> Tensor:
        """[num_out, num_in] in the compute dtype. Raises ModelError."""
        whole = weights.matrix_to_cut(self.stored, self.shape)
        start, size = self.rows.start, len(self.rows)
        _, part, _ = whole.split([start, size, self.shape[0] - start - size])
        plain = part if isinstance(part, Tensor) else part.dequantized().to(weights.dtype)
        return plain.t().contiguous() if self.transposed else plain


@dataclass(frozen=True, slots=True)
class Projection:
    """Matrices [num_outs[i], num_in] over one input, used as one: q, k and v; gate and up (`gated`); or one alone.

    `fused`: they are stored in one tensor of this name, one below the other.
    """

    names: tuple[str, ...]
    num_outs: tuple[int, ...]
    num_in: int
    bias: bool = False
    gated: bool = False
    adaptable: bool = True
    """Whether adapters may change it."""
    fused: str | None = None
    routed: bool = False
    """Whether it is an expert's, through which only a part of the tokens go."""
    piece: Piece | None = None
    """It is a piece of a stored matrix, and its name one that no tensor has."""

    @staticmethod
    def of_piece(name: str, piece: Piece) -> "Projection":
        return Projection((name,), (piece.num_out,), piece.num_in, adaptable=False, piece=piece)

    @property
    def num_out(self) -> int:
        return self.num_outs[0] if self.gated else sum(self.num_outs)

    def matrices(self, weights: Weights) -> list[Tensor | GroupedMatrix]:
        """[num_outs[i], num_in] each. Raises ModelError."""
        if self.piece is not None:
            return [self.piece.of(weights)]
        return self._apart([weights.matrix(name, shape) for name, shape in self._shapes().items()])

    def biases(self, weights: Weights) -> list[Tensor]:
        """[num_outs[i]] each, or none. Raises ModelError."""
        return self._apart([weights.take(name, shape) for name, shape in self._bias_shapes().items()])

    def is_quantized(self, weights: Weights) -> bool:
        """Whether the checkpoint has it quantized, and it is to stay so; all or none of it is."""
        return self.piece is None and any(weights.is_quantized(name) for name, _ in self._stored())

    def expect(self, weights: Weights) -> None:
        """Count the tensors as taken, without reading them. Raises ModelError as taking them would."""
        if self.piece is not None:
            weights.expect_matrix(self.piece.stored, self.piece.shape)
            return
        for name, shape in self._shapes().items():
            weights.expect_matrix(name, shape)
        for name, bias_shape in self._bias_shapes().items():
            weights.expect(name, bias_shape)

    def _shapes(self) -> dict[str, tuple[int, int]]:
        return {name: (rows, self.num_in) for name, rows in self._stored()}

    def _bias_shapes(self) -> dict[str, tuple[int, ...]]:
        if not self.bias:
            return {}
        return {f"{name}.bias": (rows,) for name, rows in self._stored()}

    def _stored(self) -> list[tuple[str, int]]:
        if self.fused is not None:
            return [(self.fused, sum(self.num_outs))]
        return list(zip(self.names, self.num_outs, strict=True))

    def _apart(self, stored: list[Any]) -> list[Any]:
        return list(stored[0].split(list(self.num_outs))) if self.fused is not None and stored else stored


@contextmanager
def naming(projection: Projection) -> Iterator[None]:
    """Says whose weight it was that could not be packed."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{'+'.join(projection.names)}: {error}") from error


def split(matrices: Sequence[Tensor | GroupedMatrix]) -> tuple[list[Tensor], list[GroupedMatrix]]:
    """A projection's matrices, all on the one side or on the other. Raises ValueError."""
    plain = [matrix for matrix in matrices if isinstance(matrix, Tensor)]
    quantized = [matrix for matrix in matrices if isinstance(matrix, GroupedMatrix)]
    if plain and quantized:
        raise ValueError("matrices over one input must be quantized all or none")
    return plain, quantized


class WeightSource(Protocol):
    """Gives each weight once, in the compute dtype. Raises ModelError when a tensor is missing or shaped otherwise."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """A small tensor, such as a norm's; in `dtype` if it is not to be in the compute dtype."""
        ...

    def pack(self, projection: Projection) -> Any:
        """A weight as the kernel set wants it."""
        ...


class DirectSource:
    """Packs the stored tensors as they are asked for; what `pack` copies is this process's own memory."""

    def __init__(self, kernels: ModelKernels, weights: Weights) -> None:
        self._kernels = kernels
        self._weights = weights

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return self._weights.take(name, shape, dtype).to(self._kernels.device)

    def pack(self, projection: Projection) -> Any:
        matrices, biases = projection.matrices(self._weights), projection.biases(self._weights)
        with naming(projection):
            plain, quantized = split(matrices)
            if quantized:
                dtype = self._weights.dtype
                return self._kernels.pack_groups(*quantized, dtype=dtype, biases=biases, gated=projection.gated)
            return self._kernels.pack(*plain, biases=biases, gated=projection.gated)


class NotedSource:
    """Another source, and what was packed from it, with its size."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.packed_bytes: dict[Projection, int] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return self._source.take(name, shape, dtype)

    def pack(self, projection: Projection) -> Any:
        weight = self._source.pack(projection)
        self.packed_bytes[projection] = weight.nbytes
        return weight
