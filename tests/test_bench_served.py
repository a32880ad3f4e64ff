"""Served systems beside each other: a peer that can't start says why, at once."""

from pathlib import Path

import pytest

from bench.served.systems import SystemFailed
from bench.served.vllm_pd import vllm_pd


async def test_a_peer_that_ends_is_not_waited_for(tmp_path: Path) -> None:
    program = tmp_path / "environment" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho Illegal instruction\nexit 132\n")
    program.chmod(0o700)
    with pytest.raises(SystemFailed, match=r"ended with code 132:\nIllegal instruction"):
        async with vllm_pd(tmp_path / "environment", tmp_path, tmp_path):
            pass
