"""What `make bench-llama` prepares: the peer's build, and the files that both sides read."""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.peers import compare_llama, model

SETUP = Path(compare_llama.__file__).with_name("setup_llama.sh")
_PYTHON3 = """#!/bin/sh
mkdir -p "$3/bin"
printf '#!/bin/sh\\necho "[$CFLAGS][$CXXFLAGS][$CC][$CXX] $*" >>"%s/log"\\n' "$3" >"$3/bin/python"
chmod +x "$3/bin/python"
"""


@pytest.mark.parametrize(
    ("has_amx", "compiler", "flags"),
    [(True, "gcc", "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"), (True, None, ""), (False, "gcc", "")],
    ids=["gcc", "clang", "no AMX"],
)
def test_the_peer_is_built_with_amx_by_clang_alone(
    tmp_path: Path, *, has_amx: bool, compiler: str | None, flags: str
) -> None:
    """Which is taken if it is there. llama.cpp's own options don't leave AMX out beside GGML_NATIVE."""
    scripts = {"python3": _PYTHON3, "grep": f"#!/bin/sh\nexit {int(not has_amx)}\n", "clang": "", "clang++": ""}
    for name, script in scripts.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if name not in ("CFLAGS", "CXXFLAGS", "CC", "CXX")}
    inherited |= {} if compiler is None else {"CC": compiler, "CXX": "g++"}
    environment = inherited | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LLAMA_CPP_PYTHON_VERSION": "1.2"}
    subprocess.run([str(SETUP), str(tmp_path / "peer")], check=True, env=environment)
    pip = (tmp_path / "peer" / "log").read_text().splitlines()[0]
    built = f" {flags}" if flags else ""
    by = "[gcc][g++]" if compiler else "[clang][clang++]"
    assert pip.startswith(f"[{built}][{built}]{by} -m pip ")
    assert pip.endswith(" install --no-cache-dir --no-binary llama-cpp-python llama-cpp-python==1.2")
    assert (tmp_path / "peer" / ".ready").exists()


def test_a_demo_file_cut_short_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(path: Path, *, overwrite: bool) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    def whole(path: Path, *, overwrite: bool) -> None:
        assert overwrite
        path.write_bytes(b"whole")

    for assemble in (killed, whole):
        monkeypatch.setattr(model, "import_module", lambda _, it=assemble: SimpleNamespace(assemble=it))
        if assemble is killed:
            with pytest.raises(KeyboardInterrupt):
                model.demo_gguf(tmp_path)
    assert model.demo_gguf(tmp_path).read_bytes() == b"whole"


def test_another_file_of_the_same_name_is_expanded_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def convert(gguf: Path, out: Path) -> Path:
        made.append(gguf.read_bytes())
        out.mkdir()
        return out

    monkeypatch.setattr(model, "convert_gguf", convert)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    first = model.expanded(file, tmp_path)
    assert model.expanded(file, tmp_path) == first
    file.write_bytes(b"another")
    assert model.expanded(file, tmp_path) != first
    assert made == [b"one", b"another"]
