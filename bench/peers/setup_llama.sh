#!/usr/bin/env bash
# llama-cpp-python in a virtual environment of its own: setup_llama.sh DIR. Builds llama.cpp from source, about 5 minutes.
# AMX is left out: its tile code dies with SIGILL when GCC 12 builds it. -march=native (GGML_NATIVE) would bring it, whatever
# GGML_AMX_* say; -mno-… after it or before wins. No wheel of pip's cache: it may have been built with other flags, elsewhere.
set -euo pipefail
directory=${1:?usage: setup_llama.sh DIR}
version=${LLAMA_CPP_PYTHON_VERSION:-}

python3 -m venv "$directory"
pip() { "$directory/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
export CMAKE_ARGS="-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON"
if grep -qw amx_tile /proc/cpuinfo; then
  no_amx="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
  export CFLAGS="${CFLAGS:-} $no_amx" CXXFLAGS="${CXXFLAGS:-} $no_amx"
fi
pip install --no-cache-dir --no-binary llama-cpp-python "llama-cpp-python${version:+==$version}"
"$directory/bin/python" -c 'import llama_cpp; print("llama-cpp-python", llama_cpp.__version__)'
touch "$directory/.ready"
