"""A checkpoint's `quantization_config`: which format it names, or a refusal that names field and value."""

from collections.abc import Mapping
from typing import Any

from engine.quantized.awq import Awq
from engine.quantized.compressed_tensors import Float8, PackQuantized
from engine.quantized.fp8 import Fp8Blocks
from engine.quantized.gguf import GROUP, GgufBlocks
from engine.quantized.gptq import Gptq
from engine.quantized.stored import StoredFormat
from kernels.grouped import GROUP_SIZES, is_group_size

METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "gguf")


def parse_quantization(config: object) -> StoredFormat:
    """The format that a config.json's `quantization_config` describes. Raises ValueError for what isn't supported."""
    if not isinstance(config, Mapping):
        raise ValueError(f"quantization_config is a {type(config).__name__}; it must be an object")
    fields = Fields("quantization_config", config)
    method = fields.one_of("quant_method", METHODS)
    if method == "compressed-tensors":
        return _compressed(fields)
    if method == "gguf":
        fields.one_of("group_size", (GROUP,))
        return GgufBlocks()
    if method == "fp8":
        return _fp8(fields)
    return _awq(fields) if method == "awq" else _gptq(fields)


class Fields:
    """The fields of a (nested) object, read by name; what isn't supported is a ValueError that names it."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self._name = name
        self._values = values

    def get(self, name: str, default: object = None) -> Any:
        value = self._values.get(name)
        return default if value is None else value

    def refused(self, name: str, supported: str) -> ValueError:
        """The error about one field."""
        return ValueError(f"{self._name}.{name} is {self.get(name)!r}; supported: {supported}")

    def one_of(self, name: str, supported: tuple[Any, ...], default: object = None) -> Any:
        """A value among `supported`; 1 is no True."""
        value = self.get(name, default)
        if not any(value == each and type(value) is type(each) for each in supported):
            raise self.refused(name, ", ".join(map(str, supported)))
        return value

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.one_of(name, (False, True), default))

    def absent(self, *names: str) -> None:
        """Fields that would change what the tensors stand for."""
        for name in names:
            if self.get(name):
                raise self.refused(name, "none")

    def object(self, name: str) -> "Fields":
        """A nested object."""
        value = self.get(name)
        if not isinstance(value, Mapping):
            raise self.refused(name, "an object")
        return Fields(f"{self._name}.{name}", value)

    def names(self) -> list[str]:
        return list(self._values)

    def group_size(self, *names: str) -> int:
        """The first field there is: -1 or one that kernels compute with."""
        name = next((each for each in names if self.get(each) is not None), names[0])
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or is_group_size(value)):
            raise self.refused(name, f"-1, {GROUP_SIZES}")
        return value


def _gptq(fields: Fields) -> Gptq:
    bits = fields.one_of("bits", (4, 8))
    fields.absent("dynamic", "is_marlin_format")
    fields.one_of("pack_dtype", ("int32",), "int32")
    stored = fields.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    return Gptq(bits, fields.group_size("group_size"), fields.flag("desc_act", False), stored == "gptq")


def _awq(fields: Fields) -> Awq:
    fields.one_of("bits" if fields.get("bits") is not None else "w_bit", (4,))
    version = fields.get("version", "gemm")
    if str(version).lower() != "gemm":
        raise fields.refused("version", "gemm")
    if not fields.flag("zero_point", True):
        raise fields.refused("zero_point", "True")
    return Awq(fields.group_size("group_size", "q_group_size"))


def _fp8(fields: Fields) -> StoredFormat:
    fields.one_of("fmt", ("e4m3",), "e4m3")
    fields.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    block = fields.get("weight_block_size")
    if block is None:
        return Float8(by_row=False)
    sizes = block if isinstance(block, list) and len(block) == 2 else []
    if not all(type(size) is int and size > 0 for size in sizes) or not sizes or not is_group_size(sizes[1]):
        raise fields.refused("weight_block_size", f"none, or rows and columns of a block, columns {GROUP_SIZES}")
    return Fp8Blocks(*sizes)


def _compressed(fields: Fields) -> StoredFormat:
    fields.absent("transform_config")
    if fields.get("kv_cache_scheme"):  # left alone (engine/static_kv_scales.py): the cache has its own
        scheme = fields.object("kv_cache_scheme")
        scheme.one_of("type", ("float",))
        scheme.one_of("num_bits", (8,))
    if fields.get("sparsity_config") and fields.object("sparsity_config").get("format") != "dense":
        raise fields.refused("sparsity_config", "none")
    fields.one_of("quantization_status", ("compressed", "frozen"), "compressed")
    stored = fields.one_of("format", ("pack-quantized", "float-quantized"))
    groups = fields.object("config_groups")
    if len(groups.names()) != 1:
        raise fields.refused("config_groups", "one group")
    group = groups.object(groups.names()[0])
    if group.get("targets", ["Linear"]) != ["Linear"]:
        raise group.refused("targets", "['Linear']")
    group.absent("output_activations")
    group.one_of("format", (stored,), stored)
    weights = group.object("weights")
    weights.absent("dynamic")
    if stored == "pack-quantized":
        group.absent("input_activations")
        return _pack_quantized(weights)
    weights.one_of("type", ("float",))
    weights.one_of("num_bits", (8,))
    weights.one_of("symmetric", (True,), True)
    return Float8(weights.one_of("strategy", ("tensor", "channel")) == "channel")


def _pack_quantized(weights: Fields) -> PackQuantized:
    weights.one_of("type", ("int",), "int")
    bits = weights.one_of("num_bits", (4, 8))
    by_group = weights.one_of("strategy", ("group", "channel")) == "group"
    order = weights.one_of("actorder", ("group", "dynamic", True, "weight", "static", False), False)
    return PackQuantized(
        bits,
        weights.group_size("group_size") if by_group else -1,
        weights.flag("symmetric", True),
        by_group and order in ("group", "dynamic", True),
    )
