"""Conversions from and to e4m3, against torch's: every byte, every rounding."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton import fp8
from tests.kernels.triton.mutants import mutant


@triton.jit
def _convert(source, out, CONVERT: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, COUNT)
    tl.store(out + lane, CONVERT(tl.load(source + lane)))


@triton.jit
def _convert_back(source, out, CONVERT: tl.constexpr, NATIVE: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, COUNT)
    tl.store(out + lane, CONVERT(tl.load(source + lane), out.dtype.element_ty, NATIVE))


def to_bytes(kernels: ModuleType, x: Tensor) -> Tensor:
    out = torch.empty(len(x), dtype=torch.uint8)
    _convert[(1,)](x, out, CONVERT=kernels.to_e4m3, COUNT=len(x))
    return out


def from_bytes(kernels: ModuleType, raw: Tensor, dtype: torch.dtype, native: bool) -> Tensor:
    out = torch.empty(len(raw), dtype=dtype)
    _convert_back[(1,)](raw, out, CONVERT=kernels.from_e4m3, NATIVE=native, COUNT=len(raw))
    return out


def values() -> Tensor:
    """Every e4m3 value, the middles between them and their neighbours; what is too large or no number."""
    exact = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (exact[1:] + exact[:-1]) / 2
    near = torch.cat((middles, middles.nextafter(torch.tensor(1e9)), middles.nextafter(torch.tensor(0.0))))
    odd = torch.tensor([448.0, 464.0, 1e30, torch.inf, torch.nan, 1e-30, 0.0])
    positive = torch.cat((exact, near, odd))
    both = torch.cat((positive, -positive))
    return torch.nn.functional.pad(both, (0, 1024 - len(both)))


def expected(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def test_every_rounding_is_torchs() -> None:
    x = values()
    found = to_bytes(fp8, x)
    number = ~x.isnan()
    assert torch.equal(found[number], expected(x)[number])
    assert (found[~number] & 0x7F == 0x7F).all()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_byte_is_torchs(dtype: torch.dtype, native: bool) -> None:
    raw = torch.arange(256).to(torch.uint8)
    number = raw & 0x7F != 0x7F
    found = from_bytes(fp8, raw, dtype, native)
    assert torch.equal(found[number], raw.view(torch.float8_e4m3fn).to(dtype)[number])
    assert native or found[~number].isnan().all()  # the interpreter's own conversion gives a number


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("+ ((bits >> 20) & 1)", ""),
        ("0x7FFFF", "0x80000"),
        ("size < 0.015625", "size < 0.0625"),
        ("rounded | sign", "rounded"),
        ("tl.minimum(tl.abs(x), MAX_E4M3)", "tl.abs(x)"),
    ],
)
def test_a_planted_bug_in_rounding_goes_red(old: str, new: str, tmp_path: Path) -> None:
    x = values()[~values().isnan()][:512]
    x = torch.cat((x[-200:], x[:312]))
    broken = mutant(fp8, old, new, tmp_path)
    assert not torch.equal(to_bytes(broken, x), expected(x))
