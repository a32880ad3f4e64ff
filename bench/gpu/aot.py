"""Compiles every Triton kernel ahead of time, without a GPU, and keeps what came out in `aot.csv`.

    PYTHONPATH=. python bench/gpu/aot.py                     writes bench/gpu/aot.csv
    PYTHONPATH=. python bench/gpu/aot.py --check             compiles and compares with it; exit 1 names the differences
        [--kernel NAME ...] [--model NAME ...] [--arch 80 90 100]

It calls the launchers themselves (`aot_cases.py`) and takes the launch instead of a device: arguments are specialised
as triton would on a GPU (pointers and integers divisible by 16, integers equal to 1). Registers and stack come from
cuobjdump, instructions from the disassembly. A stack other than 0 means spills; shared memory must fit.
"""

import argparse
import csv
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from bench.gpu.aot_cases import MODELS, calls
from kernels.triton import attention_shapes, decode_attention, linear, prefill_attention

TABLE = Path(__file__).with_name("aot.csv")
ARCHS = (80, 90, 100)
SHARED_LIMIT = {80: 166_912, 90: 232_448, 100: 232_448}  # bytes a program may have: 163, 227, 227 KiB

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float64: "*fp64",
    torch.uint8: "*u8",
}


@dataclass(frozen=True)
class Row:
    """One compiled kernel. `loads`, `stores`, `matrix`: instructions in the machine code, as name x count."""

    kernel: str
    model: str
    arch: int
    warps: int
    stages: int
    registers: int
    stack: int
    shared: int
    loads: str
    stores: str
    matrix: str


@dataclass(frozen=True)
class Launch:
    """What a launcher asked for."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, int]


@contextmanager
def recorded(arch: int) -> Iterator[list[Launch]]:
    """Within it, launches are recorded as a device of that architecture would get them, and not run."""
    launches: list[Launch] = []
    run = JITFunction.run
    for launcher in (attention_shapes, decode_attention, linear, prefill_attention):
        launcher.device_arch = lambda device: arch

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(_specialise(self, args, kwargs))

    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = run


def _specialise(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    values = dict(zip(kernel.arg_names, args, strict=False))
    options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion") if name in kwargs}
    values.update(kwargs)
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        fixed = parameter.is_constexpr or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize)
        if fixed:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        address = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if not fixed and isinstance(address, int) and address % 16 == 0 and not parameter.do_not_specialize:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return Launch(kernel, signature, constants, attributes, options)


def compile_all(kernels: list[str], models: list[str], archs: list[int]) -> Iterator[Row]:
    """A row for every kernel that an op launches; what is the same launch for several models is compiled once."""
    compiled: dict[str, Row] = {}
    for model in MODELS:
        if models and model.name not in models:
            continue
        for name, call in calls(model):
            if (kernels and name not in kernels) or (model.attention_only and not name.endswith("_attention")):
                continue
            for arch in archs:
                with recorded(arch) as found:
                    call()
                for launch in found:
                    full = f"{name}/{launch.kernel.__name__.strip('_').removesuffix('_kernel')}"
                    same = repr((arch, launch))
                    if same not in compiled:
                        compiled[same] = compile_one(full, model.name, launch, arch)
                    yield replace(compiled[same], kernel=full, model=model.name)


def compile_one(name: str, model: str, launch: Launch, arch: int) -> Row:
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _cuobjdump("--dump-resource-usage", file.name)
        code = _cuobjdump("--dump-sass", file.name)
    registers, stack = (int(number) for number in re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0])
    return Row(
        kernel=name,
        model=model,
        arch=arch,
        warps=compiled.metadata.num_warps,
        stages=compiled.metadata.num_stages,
        registers=registers,
        stack=stack,
        shared=compiled.metadata.shared,
        loads=_count(code, r"\b(LDG(?:STS)?\.E[.\w]*|UTMALDG[.\w]*)"),
        stores=_count(code, r"\b(STG\.E[.\w]*|UTMASTG[.\w]*)"),
        matrix=_count(code, r"\b((?:H|HG|UTCH)MMA)\b"),
    )


def _cuobjdump(*arguments: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, *arguments], check=True, capture_output=True, text=True).stdout


def _count(code: str, pattern: str) -> str:
    """ "128x4 64x1": memory instructions by their width in bits, others by name."""
    found = Counter(_width(name) for name in re.findall(pattern, code))
    return " ".join(f"{name}x{count}" for name, count in sorted(found.items()))


def _width(instruction: str) -> str:
    if not instruction.startswith(("LDG", "STG")):
        return instruction
    kind = "async" if instruction.startswith("LDGSTS") else ""
    sizes = re.findall(r"\.(?:[US]?(8|16|64|128|256))(?=\.|$)", instruction)
    return kind + (sizes[-1] if sizes else "32")


def read_table() -> dict[tuple[str, str, int], Row]:
    with TABLE.open(newline="") as file:
        rows = [Row(**{f.name: f.type(line[f.name]) for f in fields(Row)}) for line in csv.DictReader(file)]
    return {(row.kernel, row.model, row.arch): row for row in rows}


def problems(row: Row) -> list[str]:
    """What no kernel may have, whatever the table says."""
    label = f"{row.kernel} {row.model} sm_{row.arch}"
    found = [f"{label}: {row.stack} bytes of stack, so registers are spilled"] if row.stack else []
    if row.shared > SHARED_LIMIT[row.arch]:
        found.append(f"{label}: {row.shared} bytes of shared memory, at most {SHARED_LIMIT[row.arch]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--kernel", nargs="*", default=[])
    parser.add_argument("--model", nargs="*", default=[])
    parser.add_argument("--arch", nargs="*", type=int, default=list(ARCHS))
    options = parser.parse_args()
    rows = []
    wrong = []
    table = read_table() if options.check else {}
    for row in compile_all(options.kernel, options.model, options.arch):
        print(row, flush=True)
        rows.append(row)
        wrong += problems(row)
        if options.check and table.get((row.kernel, row.model, row.arch)) != row:
            wrong.append(f"the table has {table.get((row.kernel, row.model, row.arch))}\n       compiled {row}")
    if not options.check and not (options.kernel or options.model):
        with TABLE.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([field.name for field in fields(Row)])
            writer.writerows([getattr(row, field.name) for field in fields(Row)] for row in rows)
    print("\n".join(wrong) or f"{len(rows)} kernels, no spills, shared memory within limits")
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
