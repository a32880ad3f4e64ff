"""One part of `run.sh`: checks, timings, model or pair, or the table of what they left. See there."""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("checks", "timings", "model", "pair", "table"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    from bench.gpu import results

    if options.dry_run:
        from kernels.triton import interpreter

        interpreter.enable()
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        print("torch sees no GPU; --dry-run needs none", file=sys.stderr)
        return 2
    device = torch.device("cpu" if options.dry_run else "cuda")
    if options.part == "table":
        print(hardware(device))
        print(results.table(options.out))
        return 0
    if options.part == "checks":
        from bench.gpu.checks import rows
    elif options.part == "timings":
        from bench.gpu.timings import rows
    elif options.part == "model":
        from bench.gpu.model import rows
    else:
        from bench.gpu.pair import rows
    return 0 if results.write(options.out / f"{options.part}.csv", rows(device)) else 1


def hardware(device: "object") -> str:
    import torch
    import triton

    name = torch.cuda.get_device_name() if str(device) == "cuda" else "no GPU: a dry run in Triton's interpreter"
    return f"{name}; torch {torch.__version__}, triton {triton.__version__}"


if __name__ == "__main__":
    sys.exit(main())
