"""One process at a time starts on a GPU: what another one takes meanwhile would count as this one's own."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from engine.cache_dir import default_cache_dir

logger = logging.getLogger(__name__)


@contextmanager
def device_turn(uuid: str) -> Iterator[None]:
    """Waits until no other process of this user starts on the GPU `uuid`; the kernel ends a killed one's turn."""
    file = default_cache_dir() / "gpus" / f"{uuid}.lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is starting on GPU %s: waiting until it has its memory (%s)", uuid, file)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
