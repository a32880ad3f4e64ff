#!/usr/bin/env bash
# Everything to measure on a day with a GPU, in at most 6 minutes: bench/gpu/run.sh [--dry-run] OUT_DIR
#
# Needs torch, triton and transformers (with what those bring), no network, and nothing of ours installed: this
# repository is the PYTHONPATH, and what wheels are in bench/gpu/wheels. Where llguidance isn't installed, its wheel
# must be there (pip download --no-deps -d bench/gpu/wheels llguidance). 1P1D takes all that pagewire needs, and psutil:
# where some of it is missing, its row says so. --dry-run: tiny shapes in Triton's
# interpreter on the CPU, which runs the same code and measures nothing.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
dry=()
[ "${1:-}" = --dry-run ] && { dry=(--dry-run); export TRITON_INTERPRET=1; shift; }
[ $# -eq 1 ] || { echo "usage: bench/gpu/run.sh [--dry-run] OUT_DIR" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
python=${PYTHON:-python3}
for wheel in "$root"/bench/gpu/wheels/*.whl; do
  [ ! -e "$wheel" ] || "$python" -m zipfile -e "$wheel" "$out/wheels"
done
export PYTHONPATH=$root:$out/wheels
cd "$out"
rm -f -- checks.csv timings.csv model.csv pair.csv table.txt failed.txt
status=0
# Each part is a process with a limit of its own: what one breaks, the others do not miss.
for part in checks:80 timings:130 model:70 pair:80; do
  # A dry run has no device to give back, and other load may be there.
  [ ${#dry[@]} -eq 0 ] || part=${part%:*}:900
  timeout "${part#*:}" "$python" "$root/bench/gpu/run.py" "${dry[@]}" --part "${part%:*}" --out "$out" || {
    echo "${part%:*} ended with $? (124: it took more than ${part#*:} s)" | tee -a "$out/failed.txt" >&2
    status=1
  }
done
"$python" "$root/bench/gpu/run.py" "${dry[@]}" --part table --out "$out" | tee "$out/table.txt"
exit $status
