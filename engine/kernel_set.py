"""The kernels a model runs on: what layers ask of every kernel set, and which one to use."""

import logging
import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from engine import kernels_package  # noqa: F401  (first: says plainly when `kernels` is not ours)
from engine.errors import ModelError
from engine.model_config import Activation
from engine.plain_kernels import KernelSet, PlainKernels
from kernels import cpu, reference
from kernels.grouped import GroupedMatrix
from kernels.int8 import Quantization
from kernels.kv_cells import Cells, KvFormat
from kernels.lora import Lora
from kernels.products import Product
from kernels.routing import Routed, RoutingRule
from kernels.tiled import TiledKernels

__all__ = ["KernelSet", "ModelKernels", "load_kernel_set", "numerics_class"]

logger = logging.getLogger(__name__)


class ModelKernels(Protocol):
    """What the layers are written with.

    `pack`s make weights, `plan_attention` plans, batches are those of `kernels.paged.StepBatch`: each set's own, opaque
    here.
    """

    @property
    def NAME(self) -> str: ...
    @property
    def isa(self) -> str: ...
    @property
    def quantization(self) -> Quantization | None: ...
    @property
    def device(self) -> torch.device: ...
    def pack(self, *weights: Tensor, biases: Sequence[Tensor] = (), gated: bool = False) -> Any: ...
    def pack_groups(
        self, *weights: GroupedMatrix, dtype: torch.dtype, biases: Sequence[Tensor] = (), gated: bool = False
    ) -> Any: ...
    def linear(self, x: Tensor, weight: Any, *, residual: Tensor | None = None, lora: Lora | None = None) -> Tensor: ...
    def gated_linear(self, x: Tensor, weight: Any, activation: Activation, *, lora: Lora | None = None) -> Tensor: ...
    def linear_each(self, products: Sequence[Product], activation: Activation | None = None) -> None: ...
    def combine(self, results: Tensor, weights: Tensor, places: Tensor) -> Tensor: ...
    def route(self, logits: Tensor, rule: RoutingRule) -> Routed: ...
    def logits(self, x: Tensor, weight: Any, *, lora: Lora | None = None) -> Tensor: ...
    def lora(self, y: Tensor, x: Tensor, change: Lora) -> None: ...
    def router_logits(self, x: Tensor, weight: Tensor) -> Tensor: ...
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor: ...
    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False
    ) -> tuple[Tensor, Tensor]: ...
    def add(self, x: Tensor, y: Tensor) -> Tensor: ...
    def columns(self, x: Tensor, order: Tensor) -> Tensor: ...
    def rope_tables(self, positions: Tensor, inv_freq: Tensor, scaling: float) -> tuple[Tensor, Tensor]: ...
    def rope_and_store(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Cells,
        v_cache: Cells,
        batch: Any,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
        unit_offset: bool = False,
    ) -> Tensor: ...
    def soft_cap(self, x: Tensor, cap: float) -> Tensor: ...
    def embedding(
        self, ids: Tensor, weight: Any, scale: float | None = None, *, lora: Lora | None = None
    ) -> Tensor: ...
    def plan_attention(self, batch: Any, *, group_size: int, window: int | None) -> Any: ...
    def paged_attention(
        self, q: Tensor, k_cache: Cells, v_cache: Cells, plan: Any, *, scale: float, cap: float | None = None
    ) -> Tensor: ...


def load_kernel_set(
    name: str, threads: int = 1, quantization: Quantization | None = None, device: str = "cpu"
) -> ModelKernels:
    """The kernel set `name`, its ops on `threads` threads, its weights quantized on packing. Raises ModelError.

    native       kernels/cpu, on the instruction set PAGEWIRE_CPU_ISA or the best one here
    torch        kernels/tiled.py
    reference    the float64 oracle
    triton       kernels/triton, on `device` "cuda", or on "cpu" in Triton's interpreter
    auto         native where it runs, else torch with a warning in the log; triton on "cuda"
    """
    if name == "triton" or (name == "auto" and device != "cpu"):
        return _triton(torch.device(device), quantization)
    if device != "cpu":
        raise ModelError(f"kernels = {name} run on the CPU only; device = {device} needs triton")
    if name == "native" or (name == "auto" and cpu.available()):
        return _native(threads, quantization)
    if name == "auto" and os.environ.get("PAGEWIRE_CPU_ISA") != "torch":
        logger.warning("running on the slower torch kernels: %s", cpu.why_unavailable())
    if name in ("auto", "torch"):
        return PlainKernels(TiledKernels(threads), quantization)
    if name == "reference":
        return PlainKernels(reference, quantization)
    raise ModelError(f"kernels {name!r} is not known; known are auto, native, torch, reference, triton")


def _native(threads: int, quantization: Quantization | None) -> ModelKernels:
    from kernels.cpu.native import NativeKernels

    try:
        extension = cpu.load()
    except ImportError as error:
        raise ModelError(f"kernels = native: {error}") from error
    extension.configure_threads(threads)
    torch.set_num_threads(1)  # its few small ops would only wake a second pool
    return NativeKernels(extension, quantization)


def _triton(device: torch.device, quantization: Quantization | None) -> ModelKernels:
    from kernels.triton import interpreter
    from kernels.triton.device import why_unavailable

    if reason := why_unavailable(device):
        raise ModelError(f"kernels = triton on device = {device}: {reason}")
    if quantization is not None:
        raise ModelError(f"quantization = {quantization}: the triton kernels have none")
    if device.type == "cpu":
        interpreter.enable()
    from kernels.triton.kernel_set import TritonKernels

    return TritonKernels(device)


def numerics_class(
    kernels: ModelKernels,
    dtype: torch.dtype,
    *,
    stored: str | None = None,
    implementation: str = "",
    num_ranks: int = 1,
) -> str:
    """Within one class logits are bitwise equal on every path (DESIGN §4).

    `stored`: the checkpoint's quantization; `implementation`: of the model, if it isn't pagewire's; `num_ranks`: how
    many share it out (tensor parallelism), each adding up a part of the sums.
    """
    quantization = stored or kernels.quantization
    quantized = f"+{quantization}" if quantization else ""
    name = f"{implementation}+{kernels.NAME}" if implementation else kernels.NAME
    return f"{str(dtype).removeprefix('torch.')}{quantized}/{name}/{kernels.isa}/tp{num_ranks}"


def with_kv_format(numerics: str, kv_format: KvFormat | None) -> str:
    """The class of a model whose KV cache has that format."""
    if kv_format is None:
        return numerics
    numbers, rest = numerics.split("/", 1)
    return f"{numbers}+kv_{kv_format}/{rest}"
