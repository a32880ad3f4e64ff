"""A model's weights: found, checked, and mapped in the compute dtype.

Nothing is copied on load, so prefill and decode on one host share the pages. Weights stored in another dtype are
mapped from a converted copy (`converted_weights.py`).
"""

from pathlib import Path

import torch
from torch import Tensor

from engine.cache_dir import default_cache_dir
from engine.converted_weights import COMPUTE_NAMES, converted, dense_bytes
from engine.errors import ModelError
from engine.expert_tensors import by_expert
from engine.parallel.shard import Shard
from engine.quantized.cut import cut_matrix
from engine.quantized.stored import StoredFormat, StoredMatrix
from engine.safetensors_file import MappedFiles, TensorEntry, find_tensors
from engine.static_kv_scales import without_static_scales
from engine.weights_digest import Progress
from kernels.grouped import GroupedMatrix

_FLOATS = ("F32", "F16", "BF16")
_KEPT = (".e_score_correction_bias", ".mlp.gate.weight")
"""Tensors of such names stay as they are stored: who is routed where may hang on their last bits."""


class Weights:
    """Named tensors in the compute dtype. Every tensor must be taken once, with its shape, or `finish` complains.

    Matrices that the checkpoint has quantized, in the format `quantization`, stay so. Of a rank's `shard` the shapes
    are those of its parts, and nothing else is read.

    Names are looked up below the model's prefix: "layers.0.…" is "model.layers.0.…", or, in a multimodal checkpoint,
    "model.language_model.layers.0.…".
    """

    def __init__(
        self,
        directory: Path,
        entries: dict[str, TensorEntry],
        dtype: torch.dtype,
        quantization: StoredFormat | None = None,
        shard: Shard | None = None,
    ) -> None:
        self._shard = shard
        self._directory = directory
        self._entries = by_expert(entries)
        self.dtype = dtype
        self._quantization = quantization
        self._files = MappedFiles()
        kinds = ("weight",) if quantization is None else ("weight", quantization.marker)
        ends = tuple(dict.fromkeys(f"embed_tokens.{kind}" for kind in kinds))
        embeddings = [name for name in entries if name.endswith(ends)]
        if len(embeddings) != 1:
            raise ModelError(f"{directory}: expected one tensor …embed_tokens.weight, found {embeddings}")
        self._prefix = embeddings[0].rpartition("embed_tokens.")[0]
        self._taken: set[str] = set()
        self._cut: tuple[str, Tensor | GroupedMatrix] | None = None

    @property
    def num_bytes(self) -> int:
        """The size of all tensors in the compute dtype, of quantized ones as they are stored."""
        if self._quantization is None:
            return dense_bytes(self._entries, self.dtype)
        dense = {name: entry for name, entry in self._entries.items() if entry.dtype in _FLOATS}
        stored = sum(entry.num_bytes for name, entry in self._entries.items() if name not in dense)
        return dense_bytes(dense, self.dtype) + stored

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor `name` of this `shape`. Raises ModelError when it is missing or shaped otherwise.

        In `dtype`, or else in the compute dtype.

        "lm_head.weight" is the output matrix of an untied model, wherever it is.
        """
        stored = self._files.tensor(self.expect(name, shape))
        return (stored if self._shard is None else self._shard.cut(name, shape).of(stored)).to(dtype or self.dtype)

    def matrix(self, name: str, shape: tuple[int, int]) -> Tensor | GroupedMatrix:
        """The weight of the module `name`, as `take` or as the checkpoint has it quantized. Raises ModelError."""
        if self._quantization is None or not self.is_quantized(name):
            return self.take(f"{name}.weight", shape)
        entries = self._quantized(name)
        tensors = {suffix: self._files.tensor(entry) for suffix, entry in entries.items()}
        try:
            if self._shard is None:
                return self._quantization.read(StoredMatrix(tensors), *shape)
            cut = self._shard.cut(f"{name}.weight", shape)
            rows, columns = cut.whole
            return cut_matrix(self._quantization.read(StoredMatrix(tensors), rows, columns), cut, name)
        except ValueError as error:
            raise ModelError(f"{self._directory}: {self._full_name(name)}: {error}") from error

    def matrix_to_cut(self, name: str, shape: tuple[int, int]) -> Tensor | GroupedMatrix:
        """As `matrix`, read once for all pieces that are taken of it in a row."""
        if self._cut is None or self._cut[0] != name:
            self._cut = (name, self.matrix(name, shape))
        return self._cut[1]

    def expect_matrix(self, name: str, shape: tuple[int, int]) -> None:
        """Count what `matrix` reads as taken. Raises ModelError for what isn't quantized, as `expect` would."""
        if self.is_quantized(name):
            self._quantized(name)
        else:
            self.expect(f"{name}.weight", shape)

    def is_quantized(self, name: str) -> bool:
        """Whether the checkpoint has the matrix of the module `name` quantized."""
        return (
            self._quantization is not None and f"{self._full_name(name)}.{self._quantization.marker}" in self._entries
        )

    def _quantized(self, name: str) -> dict[str, TensorEntry]:
        """By suffix; they count as taken."""
        module = self._full_name(name)
        suffixes = () if self._quantization is None else self._quantization.suffixes
        found = {suffix: f"{module}.{suffix}" for suffix in suffixes if f"{module}.{suffix}" in self._entries}
        self._taken.update(found.values())
        return {suffix: self._entries[full_name] for suffix, full_name in found.items()}

    def _full_name(self, module: str) -> str:
        if module != "lm_head":
            return self._prefix + module
        heads = {head for each in self._entries if (head := each.rpartition(".")[0]).endswith(module)}
        return heads.pop() if len(heads) == 1 else module

    def expect(self, name: str, shape: tuple[int, ...]) -> TensorEntry:
        """Where `take` finds it; counts as taken. Raises ModelError."""
        shape = shape if self._shard is None else self._shard.cut(name, shape).whole
        module, _, kind = name.rpartition(".")
        full_name = f"{self._full_name(module)}.{kind}"
        entry = self._entries.get(full_name)
        if entry is None:
            raise ModelError(f"{self._directory}: tensor {full_name} {list(shape)} is missing")
        if entry.shape != shape:
            raise ModelError(
                f"{entry.file}: tensor {full_name} is {list(entry.shape)}; the config asks for {list(shape)}"
            )
        if entry.dtype not in _FLOATS:
            raise ModelError(
                f"{entry.file}: tensor {full_name} is {entry.dtype} with no scales; it can't be read as it is"
            )
        self._taken.add(full_name)
        return entry

    def finish(self, unserved_layers: range = range(0)) -> None:
        """Raise ModelError when the text model has tensors that nothing took: the result would be wrong.

        Those of `unserved_layers` may be there: they come after the model's own, to guess tokens further on.
        """
        guessing = tuple(f"{self._prefix}layers.{layer}." for layer in unserved_layers)
        unused = sorted(
            name
            for name in self._entries
            if name.startswith(self._prefix) and name not in self._taken and not name.endswith("rotary_emb.inv_freq")
        )
        unused = [name for name in unused if not name.startswith(guessing)]
        unused = [name for name in unused if not name.endswith("lm_head.weight")]  # present in some tied models
        foreign = ("vision", "multi_modal", "audio") if self._prefix != "model.language_model." else ()
        unused = [name for name in unused if not name.removeprefix(self._prefix).startswith(foreign)]
        unused = [name for name in unused if not self._is_no_bias(name)]
        unused = without_static_scales(self._directory, unused)
        if unused:
            raise ModelError(
                f"{self._directory}: {len(unused)} tensors are not part of this architecture: {', '.join(unused[:3])}"
            )

    def _is_no_bias(self, name: str) -> bool:
        """Quantizers write biases of zeros for modules that have none."""
        module, _, kind = name.rpartition(".")
        quantized = self.is_quantized(module.removeprefix(self._prefix))
        return quantized and kind == "bias" and not bool(self._files.tensor(self._entries[name]).any())


def open_weights(
    path: Path | str,
    dtype: torch.dtype,
    *,
    progress: Progress | None = None,
    cache_dir: Path | None = None,
    shard: Shard | None = None,
) -> Weights:
    """Map the weights of a model directory in `dtype`. Raises ModelError."""
    directory = Path(path)
    entries = _find_floats(directory)
    kept = {name: entry for name, entry in entries.items() if name.endswith(_KEPT)}
    others = {name: entry for name, entry in entries.items() if name not in kept}
    if any(entry.dtype != COMPUTE_NAMES[dtype] for entry in others.values()):
        entries = converted(directory, others, dtype, progress, cache_dir or default_cache_dir()) | kept
    elif progress is not None:
        total = dense_bytes(entries, dtype)
        progress(total, total)
    return Weights(directory, entries, dtype, shard=shard)


def map_weights(
    path: Path | str, dtype: torch.dtype, quantization: StoredFormat | None = None, shard: Shard | None = None
) -> Weights:
    """The same without a converted copy: a tensor stored in another dtype is converted whenever it is taken.

    Matrices in the format `quantization` stay so.
    """
    directory = Path(path)
    return Weights(directory, _find_floats(directory, quantization), dtype, quantization, shard)


def _find_floats(directory: Path, quantization: StoredFormat | None = None) -> dict[str, TensorEntry]:
    """All tensors; those that no quantized matrix may have must be floating point."""
    entries = find_tensors(directory)
    suffixes = () if quantization is None else quantization.suffixes
    for entry in entries.values():
        if entry.dtype not in _FLOATS and entry.name.rpartition(".")[2] not in suffixes:
            raise ModelError(f"{entry.file}: tensor {entry.name} is {entry.dtype}; supported are {', '.join(_FLOATS)}")
    return entries
