"""Imports NIXL (extra `nixl`) and makes an agent whose progress thread sleeps.

NIXL's own Python constructor makes a progress thread that spins a core, since it polls with a delay of zero. With any
delay the thread sleeps on UCX's event descriptors and looks by itself only once per delay (0.5 % of a core at 10 ms).
It is needed: without hardware for one-sided reads (plain TCP) the sender's thread answers them.
"""

import importlib
import importlib.util
import logging
import os
from types import ModuleType
from typing import Any

from engine.transfer.plane import PlaneUnavailable

_PROGRESS_MICROSECONDS = 10_000
_MODULES = ("nixl", "nixl_cu12", "nixl_cu13")
# UCX would stop the process for a debugger on SIGHUP; NIXL writes to stderr what it also raises.
_ENVIRONMENT = {"UCX_DEBUG_SIGNO": "0", "UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "FATAL"}


def is_installed() -> bool:
    """True if there is a NIXL package to import; whether it works is another question."""
    return any(importlib.util.find_spec(name) is not None for name in _MODULES)


def _load() -> tuple[ModuleType, ModuleType]:
    """NIXL's package and its bindings."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # read when the library is loaded
    raises = logging.raiseExceptions  # NIXL changes it for the whole process
    try:
        for name in _MODULES:
            if importlib.util.find_spec(name) is not None:
                package = importlib.import_module(name)
                return package, importlib.import_module(f"{package.nixl_agent.__module__.rpartition('.')[0]}._bindings")
    finally:
        logging.raiseExceptions = raises
    raise PlaneUnavailable("NIXL is not installed (extra pagewire[nixl])")


def make_agent(name: str) -> Any:
    """A nixl_agent whose progress thread sleeps; its own constructor has no parameter for that."""
    package, bindings = _load()
    agent = package.nixl_agent(name, package.nixl_agent_config(enable_prog_thread=False, backends=[]))
    config = bindings.nixlAgentConfig()
    config.useProgThread, config.pthrDelay = True, _PROGRESS_MICROSECONDS
    config.useListenThread, config.captureTelemetry = False, False
    config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
    agent.agent = bindings.nixlAgent(name, config)
    agent.create_backend("UCX")
    return agent
