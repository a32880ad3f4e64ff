"""Where a model under construction gets its weights from, and which of them are used as one."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from engine.kernel_set import ModelKernels
from engine.weights import Weights


@dataclass(frozen=True, slots=True)
class Projection:
    """Matrices [num_outs[i], num_in] over one input, used as one: q, k and v; gate and up (`gated`); or one alone."""

    names: tuple[str, ...]
    num_outs: tuple[int, ...]
    num_in: int
    bias: bool = False
    gated: bool = False

    @property
    def num_out(self) -> int:
        return self.num_outs[0] if self.gated else sum(self.num_outs)

    def matrices(self, weights: Weights) -> list[Tensor]:
        """[num_outs[i], num_in] each. Raises ModelError."""
        return [weights.take(name, shape) for name, shape in self._shapes().items()]

    def biases(self, weights: Weights) -> list[Tensor]:
        """[num_outs[i]] each, or none. Raises ModelError."""
        return [weights.take(name, shape) for name, shape in self._bias_shapes().items()]

    def expect(self, weights: Weights) -> None:
        """Count the tensors as taken, without reading them. Raises ModelError as taking them would."""
        for name, shape in (self._shapes() | self._bias_shapes()).items():
            weights.expect(name, shape)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (rows, self.num_in) for name, rows in zip(self.names, self.num_outs, strict=True)}

    def _bias_shapes(self) -> dict[str, tuple[int, ...]]:
        if not self.bias:
            return {}
        return {f"{name}.bias": (rows,) for name, rows in zip(self.names, self.num_outs, strict=True)}


@contextmanager
def naming(projection: Projection) -> Iterator[None]:
    """Says whose weight it was that could not be packed."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{'+'.join(projection.names)}: {error}") from error


class WeightSource(Protocol):
    """Gives each weight once, in the compute dtype. Raises ModelError when a tensor is missing or shaped otherwise."""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A small tensor, such as a norm's."""
        ...

    def pack(self, projection: Projection) -> Any:
        """A weight as the kernel set wants it."""
        ...


class DirectSource:
    """Packs the stored tensors as they are asked for; what `pack` copies is this process's own memory."""

    def __init__(self, kernels: ModelKernels, weights: Weights) -> None:
        self._kernels = kernels
        self._weights = weights

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._weights.take(name, shape).to(self._kernels.device)

    def pack(self, projection: Projection) -> Any:
        matrices, biases = projection.matrices(self._weights), projection.biases(self._weights)
        with naming(projection):
            return self._kernels.pack(*matrices, biases=biases, gated=projection.gated)


class NotedSource:
    """Another source, and what was packed from it."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.projections: list[Projection] = []

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._source.take(name, shape)

    def pack(self, projection: Projection) -> Any:
        self.projections.append(projection)
        return self._source.pack(projection)
