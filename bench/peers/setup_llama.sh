#!/usr/bin/env bash
# llama-cpp-python in a virtual environment of its own: setup_llama.sh DIR. Builds llama.cpp from source, 5 to 10 minutes.
# With clang (CC and CXX, else the first one there is), because its AMX tile code dies with SIGILL when GCC 12 builds it. With
# GCC alone AMX is left out: -march=native (GGML_NATIVE) would bring it, whatever GGML_AMX_* say; -mno-… after it or before
# wins. What reads images is left out. No wheel of pip's cache: it may have been built with other flags, elsewhere.
# JOBS: compilers at once.
set -euo pipefail
directory=${1:?usage: setup_llama.sh DIR}
version=${LLAMA_CPP_PYTHON_VERSION:-}

if [ -z "${CC:-}" ]; then
  for name in clang clang-19 clang-18 clang-17 clang-16 clang-15 clang-14; do
    if command -v "$name" >/dev/null && command -v "${name/clang/clang++}" >/dev/null; then
      export CC=$name CXX=${name/clang/clang++}
      break
    fi
  done
fi
python3 -m venv "$directory"
pip() { "$directory/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
export CMAKE_ARGS="-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-$(nproc)}
if grep -qw amx_tile /proc/cpuinfo && [[ ${CC:-gcc} != *clang* ]]; then
  no_amx="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
  export CFLAGS="${CFLAGS:-} $no_amx" CXXFLAGS="${CXXFLAGS:-} $no_amx"
fi
pip install --no-cache-dir --no-binary llama-cpp-python "llama-cpp-python${version:+==$version}"
"$directory/bin/python" -c 'import llama_cpp; print("llama-cpp-python", llama_cpp.__version__)'
touch "$directory/.ready"
