"""Weights in the native kernels' order: packed once into a cache file, mapped by all workers of the host.

The file is named by the weights' digest, the compute dtype, the order and the quantization. Building the model twice
keeps this simple: once on a `_FileWriter`, which packs each weight into a section of the file as the layers ask for it,
once on a `_FileSource`, which finds them there. The stored tensors are unmapped afterwards; small ones (norms) are
copied.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.file_cache import exclusive, mark_used, prune
from engine.model_config import ModelConfig
from engine.packed_group_sections import read_groups, write_groups
from engine.section_file import SectionFile, SectionFileError, SectionWriter
from engine.weight_source import DirectSource, Projection, WeightSource, naming, split
from engine.weights import Weights, map_weights
from engine.weights_digest import Progress
from kernels.cpu import packed_groups
from kernels.cpu.native import NativeKernels
from kernels.cpu.packed import LAYOUT, PANEL_ROWS, STRIP_ROWS, PackedWeight, packed_bytes
from kernels.cpu.products import NativeWeight

logger = logging.getLogger(__name__)

Model = TypeVar("Model")


def build_packed(
    config: ModelConfig,
    kernels: NativeKernels,
    build: Callable[[WeightSource], Model],
    *,
    digest: bytes,
    cache_dir: Path,
    max_cache_bytes: int | None = None,
    progress: Progress | None = None,
) -> Model:
    """The model that `build` makes, its weights mapped from the cache file; the first process that asks makes the file.

    Other files that nobody uses are deleted then, the longest unused first, while all take more than `max_cache_bytes`.
    `progress` follows the packing. Without room on the disk, or if it can't be written, the weights are packed into
    this process's own memory, with a warning. Raises ModelError.
    """
    name = f"{digest.hex()}-{config.dtype_name}-{LAYOUT}"
    if config.quantization_label:
        name += f"-{packed_groups.LAYOUT}"
    if quantization := config.quantization_label or kernels.quantization:
        name += f"-{quantization}"
    if config.shard is not None:
        name += f"-{config.shard.label}"
    file = cache_dir / "packed" / name
    try:
        try:
            return _map(file, config, kernels, build)
        except FileNotFoundError:
            file.parent.mkdir(parents=True, exist_ok=True)
        except SectionFileError as error:
            logger.warning("%s; packed again", str(error))  # a kept error would keep the frames that saw it
        with exclusive(file.with_name(f"{name}.lock")):
            try:  # another process may have made it meanwhile
                return _map(file, config, kernels, build)
            except (FileNotFoundError, SectionFileError):
                _write(file, config, kernels, build, progress)
        model = _map(file, config, kernels, build)
        if max_cache_bytes is not None:
            prune(file.parent, max_cache_bytes)
        return model
    except (OSError, SectionFileError) as error:
        logger.warning("the packed weights can't be shared, so they take this process's own memory: %s", error)
    return build_private(config, kernels, build)


def build_private(config: ModelConfig, kernels: NativeKernels, build: Callable[[WeightSource], Model]) -> Model:
    """The model that `build` makes, its weights packed into this process's own memory. Raises ModelError."""
    weights = map_weights(config.path, config.dtype, config.quantization, config.shard)
    model = build(_PrivateSource(kernels, weights))
    weights.finish(config.unserved_layers)
    return model


class _PrivateSource(DirectSource):
    """Keeps nothing of the stored tensors, so that their file is unmapped."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return super().take(name, shape, dtype).clone()


class _FileWriter:
    """Packs into the file. The weights it returns are not to be used."""

    def __init__(
        self, weights: Weights, writer: SectionWriter, kernels: NativeKernels, progress: Progress | None
    ) -> None:
        self._weights = weights
        self._writer = writer
        self._kernels = kernels
        self._progress = progress
        self._done = 0

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return self._weights.take(name, shape, dtype)

    def pack(self, projection: Projection) -> NativeWeight:
        with naming(projection):
            matrices, quantized = split(projection.matrices(self._weights))
        biases = projection.biases(self._weights)
        dtype = self._weights.dtype
        if quantized:
            with naming(projection):
                groups = self._kernels.pack_groups(*quantized, dtype=dtype, biases=biases, gated=projection.gated)
            write_groups(self._writer, _section(projection), groups)
            self._report(groups.nbytes)
            return groups
        size = _data_bytes(projection, _stored(self._kernels, dtype))
        with naming(projection), self._writer.section(_section(projection), size) as data:
            packed = self._kernels.pack(*matrices, biases=biases, gated=projection.gated, out=data)
        if packed.bias is not None:
            with self._writer.section(_bias_section(projection), packed.bias.nbytes) as data:
                data.copy_(packed.bias.view(torch.uint8))
        if packed.scales is not None:
            with self._writer.section(_scales_section(projection), packed.scales.nbytes) as data:
                data.copy_(packed.scales.view(torch.uint8))
        self._report(_data_bytes(projection, dtype))
        return packed

    def _report(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._progress is not None:
            self._progress(self._done, max(self._done, self._weights.num_bytes))


class _FileSource:
    """Finds the weights in the file; what is not there, or of another size, is a SectionFileError."""

    def __init__(self, weights: Weights, file: SectionFile, kernels: NativeKernels) -> None:
        self._weights = weights
        self._file = file
        self._kernels = kernels
        self._dtype = weights.dtype

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return self._weights.take(name, shape, dtype).clone()

    def pack(self, projection: Projection) -> NativeWeight:
        projection.expect(self._weights)
        if projection.is_quantized(self._weights):
            return read_groups(self._file, _section(projection), projection, self._dtype)
        stored = _stored(self._kernels, self._dtype)
        data = self._file.tensor(_section(projection), _data_bytes(projection, stored))
        num_bytes = _by_row_bytes(projection)
        bias = scales = None
        if projection.bias:
            bias = self._file.tensor(_bias_section(projection), num_bytes).view(torch.float32)
        if stored == torch.int8:
            scales = self._file.tensor(_scales_section(projection), num_bytes).view(torch.float32)
        return PackedWeight(data, projection.num_out, projection.num_in, self._dtype, projection.gated, bias, scales)


def _map(file: Path, config: ModelConfig, kernels: NativeKernels, build: Callable[[WeightSource], Model]) -> Model:
    weights = map_weights(config.path, config.dtype, config.quantization, config.shard)
    model = build(_FileSource(weights, SectionFile(file), kernels))
    weights.finish(config.unserved_layers)
    mark_used(file)
    return model


def _write(
    file: Path,
    config: ModelConfig,
    kernels: NativeKernels,
    build: Callable[[WeightSource], Model],
    progress: Progress | None,
) -> None:
    """Not flushed to the disk: its checksums tell if it did not get there before the power went."""
    weights = map_weights(config.path, config.dtype, config.quantization, config.shard)
    partial = file.with_name(f"{file.name}.partial")  # one of a killed process is overwritten
    try:
        with SectionWriter(partial) as writer:
            build(_FileWriter(weights, writer, kernels, progress))
            weights.finish(config.unserved_layers)
            writer.finish()
        partial.rename(file)
    except (OSError, ModelError):
        partial.unlink(missing_ok=True)
        raise


def _section(projection: Projection) -> str:
    return ("gated " if projection.gated else "") + "+".join(projection.names)


def _bias_section(projection: Projection) -> str:
    return f"{_section(projection)} bias"


def _scales_section(projection: Projection) -> str:
    return f"{_section(projection)} scales"


def _stored(kernels: NativeKernels, dtype: torch.dtype) -> torch.dtype:
    return dtype if kernels.quantization is None else torch.int8


def _data_bytes(projection: Projection, dtype: torch.dtype) -> int:
    return packed_bytes(projection.num_out, projection.num_in, dtype, gated=projection.gated)


def _by_row_bytes(projection: Projection) -> int:
    """Of biases or scales."""
    if projection.gated:
        return 2 * 4 * (-(-projection.num_out // STRIP_ROWS) * STRIP_ROWS)
    return 4 * (-(-projection.num_out // PANEL_ROWS) * PANEL_ROWS)
