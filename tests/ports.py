"""Ports for servers that must be told theirs: to find a service's metrics, or to be the same after a restart.

Other tests run at the same time, and each connection that they open takes a port of the kernel's choice. So these ports
lie below the kernel's range, and each test process has a part of its own.
"""

import fcntl
import os
import random
from itertools import count
from pathlib import Path
from tempfile import gettempdir
from typing import IO

from pagewire.ports import BindError, check_bindable

_LOWEST = 10_000
_PORTS_PER_PROCESS = 1_000


def _kernels_lowest() -> int:
    """The first port that the kernel may give to connections and to servers that don't mind."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return 32_768


def _own_ports() -> tuple[range, IO[str] | None]:
    """This process's ports, and the lock that keeps other test processes of this machine from them while it lives.

    With more processes than parts, or without a place for locks, two may have the same part.
    """
    num_parts = max(1, (_kernels_lowest() - _LOWEST) // _PORTS_PER_PROCESS)
    parts = [(os.getpid() + i) % num_parts for i in range(num_parts)]
    for part in parts:
        try:
            lock = (Path(gettempdir()) / f"pagewire-test-ports-{part}").open("w")
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
        else:
            return _ports(part), lock
    return _ports(parts[0]), None


def _ports(part: int) -> range:
    first = _LOWEST + part * _PORTS_PER_PROCESS
    return range(first, first + _PORTS_PER_PROCESS)


_own, _lock = _own_ports()
_turn = count(random.randrange(_PORTS_PER_PROCESS))  # of two processes with one part


def free_ports(num_ports: int) -> int:
    """The first of so many ports in a row that nobody listens on; handed out again only after hundreds of others."""
    for _ in range(len(_own)):
        first = _own[next(_turn) * num_ports % (len(_own) - num_ports)]
        try:
            for port in range(first, first + num_ports):
                check_bindable("127.0.0.1", port)
        except BindError:
            continue
        return first
    raise AssertionError(f"no {num_ports} free ports in a row in {_own}")


def free_port() -> int:
    """A port that nobody listens on; see `free_ports`."""
    return free_ports(1)
