"""Reads an adapter as PEFT saves it, and checks every tensor against the model's modules before anything is used."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.lora.adapter import Adapter, ContentDigest, LoraMatrices
from engine.lora.config import LoraConfig, read_lora_config
from engine.lora.errors import AdapterError
from engine.model_config import ModelConfig
from engine.safetensors_file import FileInMemory, TensorEntry
from engine.weight_source import Projection
from engine.weights import map_weights

WEIGHTS_FILE = "adapter_model.safetensors"
_FLOATS = ("F32", "F16", "BF16")
_ENDS = {
    ".lora_A.weight": "a", ".lora_B.weight": "b",
    ".lora_embedding_A": "a", ".lora_embedding_B": "b",
    ".base_layer.weight": "base",
}  # fmt: skip
_OWN_BASE = ("embed_tokens", "lm_head")
"""Modules whose unchanged weights PEFT saves beside the adapter."""
_MAX_HEADER_BYTES = 16 << 20
_PREFIXES = ("base_model.model.", "model.", "language_model.", "model.")


@dataclass(frozen=True, slots=True)
class Module:
    """A matrix [num_out, num_in] that adapters may change; `parts`, if it is made of several: their names and rows."""

    name: str
    num_out: int
    num_in: int
    parts: tuple[tuple[str, int], ...] = ()

    @property
    def is_embedding(self) -> bool:
        return self.name == "embed_tokens"


def modules_of(projections: Sequence[Projection]) -> dict[str, Module]:
    """All modules, by name."""
    modules: dict[str, Module] = {}
    for projection in projections:
        parts = tuple(zip(projection.names, projection.num_outs, strict=True))
        if projection.fused is not None:
            name = projection.fused
            modules[name] = Module(name, sum(projection.num_outs), projection.num_in, parts)
        else:
            modules |= {name: Module(name, rows, projection.num_in) for name, rows in parts}
    return modules


def read_adapter(directory: Path, config: ModelConfig, modules: Mapping[str, Module], max_rank: int) -> Adapter:
    """The adapter in `directory`, in the model's compute dtype. Raises AdapterError; nothing of it is kept then."""
    lora = read_lora_config(directory)
    file = directory / WEIGHTS_FILE
    try:
        stored = _read(file, config, modules, max_rank)
        tensors = _find(stored, lora, modules)
        digest = ContentDigest()
        found: dict[str, LoraMatrices] = {}
        for name, entries in sorted(tensors.items()):
            module = modules[name]
            if "base" in entries:
                _check_base(name, entries["base"], stored, config)
            found |= _by_part(module, _matrices(module, entries, stored, lora, config.dtype, max_rank))
            digest.add(name, lora.scale_of(name), entries, stored)
    except ModelError as error:
        raise AdapterError(str(error)) from error
    return Adapter(digest.digest(), max(each.rank for each in found.values()), found)


def _read(file: Path, config: ModelConfig, modules: Mapping[str, Module], max_rank: int) -> FileInMemory:
    """The file, if it is no larger than one that changes every module at the largest rank, in float32."""
    if not file.is_file():
        pickled = sorted(path.name for end in ("*.bin", "*.pt", "*.pth") for path in file.parent.glob(end))
        also = f" ({', '.join(pickled)} is pickled, which is never loaded)" if pickled else ""
        raise AdapterError(f"{file}: no such file{also}")
    num_values = sum(max_rank * (each.num_in + each.num_out) for each in modules.values())
    num_values += len(_OWN_BASE) * config.vocab_size * config.hidden_size
    return FileInMemory(file, 4 * num_values + _MAX_HEADER_BYTES)


def _find(stored: FileInMemory, lora: LoraConfig, modules: Mapping[str, Module]) -> dict[str, dict[str, TensorEntry]]:
    """The tensors by module and kind: a, b and, for embedding and head, what PEFT saves of the base."""
    file = stored.file
    tensors: dict[str, dict[str, TensorEntry]] = {}
    for entry in stored.entries():
        name, kind = _module_of(entry, file, modules)
        if entry.dtype not in _FLOATS:
            raise AdapterError(f"{file}: tensor {entry.name} is {entry.dtype}; supported are {', '.join(_FLOATS)}")
        if kind in tensors.setdefault(name, {}):
            raise AdapterError(f"{file}: tensor {entry.name} is there twice, under two names")
        tensors[name][kind] = entry
    for name, entries in tensors.items():
        for kind in ("a", "b"):
            if kind not in entries:
                raise AdapterError(f"{file}: module {name} has no lora_{kind.upper()}")
    if not tensors:
        raise AdapterError(f"{file}: holds no tensor")
    _check_targets(file, lora, tensors, modules)
    return tensors


def _module_of(entry: TensorEntry, file: Path, modules: Mapping[str, Module]) -> tuple[str, str]:
    """Which module the tensor belongs to, and what it is."""
    for end, kind in _ENDS.items():
        if not entry.name.endswith(end):
            continue
        name = entry.name.removesuffix(end)
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        if name not in modules or (kind == "base" and name not in _OWN_BASE):
            break
        if modules[name].is_embedding != (".lora_embedding_" in end) and kind != "base":
            break
        return name, kind
    ends = sorted({name.rpartition(".")[2] for name in modules})
    if ".experts." in entry.name:
        raise AdapterError(
            f"{file}: tensor {entry.name} changes an expert; adapters on experts are not served, those on "
            f"{', '.join(ends)} are"
        )
    raise AdapterError(
        f"{file}: tensor {entry.name} belongs to no module that can be adapted here; those are {', '.join(ends)}"
    )


def _check_targets(file: Path, lora: LoraConfig, tensors: Mapping[str, object], modules: Mapping[str, Module]) -> None:
    """A target that the model has not, or of which the file has nothing: the adapter was made for another model."""
    for target in lora.targets:
        ends = [name for name in modules if f".{name}".endswith(f".{target}") or f".{target}".endswith(f".{name}")]
        if not ends:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in modules}))
            raise AdapterError(f"{file.parent}: target module {target!r} is not one of this model's; those are {known}")
        if not any(name in tensors for name in ends):
            raise AdapterError(f"{file}: has no tensor of target module {target!r}")


def _matrices(
    module: Module,
    entries: Mapping[str, TensorEntry],
    stored: FileInMemory,
    lora: LoraConfig,
    dtype: torch.dtype,
    max_rank: int,
) -> LoraMatrices:
    rank = lora.rank_of(module.name)
    if rank > max_rank:
        raise AdapterError(f"module {module.name} has rank {rank}, the limit (max_lora_rank) is {max_rank}")
    for kind, shape in (("a", (rank, module.num_in)), ("b", (module.num_out, rank))):
        if module.is_embedding:
            shape = (rank, module.num_out) if kind == "a" else (module.num_in, rank)
        if entries[kind].shape != shape:
            raise AdapterError(
                f"{entries[kind].file}: tensor {entries[kind].name} is {list(entries[kind].shape)}; rank {rank} and "
                f"this model's {module.name} ask for {list(shape)}"
            )
    a = _finite(entries["a"], stored, 1.0, dtype)
    b = _finite(entries["b"], stored, lora.scale_of(module.name), dtype)
    return LoraMatrices((a.t() if module.is_embedding else a).contiguous(), b.t().contiguous())


def _by_part(module: Module, whole: LoraMatrices) -> dict[str, LoraMatrices]:
    """A fused module's parts have one A and their own rows of B."""
    if not module.parts:
        return {module.name: whole}
    columns = torch.split(whole.b, [rows for _, rows in module.parts], dim=1)
    return {name: LoraMatrices(whole.a, b.contiguous()) for (name, _), b in zip(module.parts, columns, strict=True)}


def _finite(entry: TensorEntry, stored: FileInMemory, scale: float, dtype: torch.dtype) -> Tensor:
    """The tensor times `scale` as the model computes with it, in memory of its own."""
    tensor = (stored.tensor(entry).float() * scale).to(dtype)
    if not bool(torch.isfinite(tensor).all()):
        times = "" if scale == 1.0 else f" after scaling by {scale:g}"
        kind = str(dtype).removeprefix("torch.")
        raise AdapterError(f"{entry.file}: tensor {entry.name} has values that are not finite in {kind}{times}")
    return tensor


def _check_base(module: str, entry: TensorEntry, stored: FileInMemory, config: ModelConfig) -> None:
    """They must be this model's."""
    name = "embed_tokens" if config.tie_word_embeddings else module
    weights = map_weights(config.path, config.dtype, config.quantization)
    if weights.is_quantized(name):
        raise AdapterError(f"{entry.file}: tensor {entry.name} replaces a matrix that this model has quantized")
    own = weights.take(f"{name}.weight", (config.vocab_size, config.hidden_size))
    if entry.shape != tuple(own.shape) or not torch.equal(stored.tensor(entry).to(config.dtype), own):
        raise AdapterError(
            f"{entry.file}: tensor {entry.name} is not this model's; the adapter's base is another model"
        )
