"""The checked-in stubs are what the protos generate, and the protos break no client of the released ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly  # the same as `make check`, which CI runs too
ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def test_stubs_are_current() -> None:
    env = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/gen_stubs.py"), "--check"],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_protos_break_nobody() -> None:
    done = subprocess.run(
        [str(BIN / "buf"), "breaking", "--against", "protos/released.binpb"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
