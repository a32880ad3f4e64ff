#!/usr/bin/env bash
# llama-cpp-python in a virtual environment of its own: setup_llama.sh DIR. Builds llama.cpp from source, about 5 minutes.
# AMX is left out: its tile code dies with SIGILL when GCC 12 builds it. Everything else that this machine has is on.
set -euo pipefail
directory=${1:?usage: setup_llama.sh DIR}
version=${LLAMA_CPP_PYTHON_VERSION:-}

python3 -m venv "$directory"
pip() { "$directory/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
export CMAKE_ARGS="-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF -DGGML_AMX_BF16=OFF"
pip install --no-binary llama-cpp-python "llama-cpp-python${version:+==$version}"
"$directory/bin/python" -c 'import llama_cpp; print("llama-cpp-python", llama_cpp.__version__)'
touch "$directory/.ready"
