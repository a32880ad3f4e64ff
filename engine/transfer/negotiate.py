"""Which planes may be used, in which order, and finding out by trying which one works."""

import logging
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.transfer.nixl_agent import NixlAgent
from engine.transfer.nixl_read import NixlReceiver
from engine.transfer.plane import BlockReceiver, Plane, PlaneUnavailable, SharedPoolInfo
from engine.transfer.shm_map import MapReceiver
from engine.transfer.shm_ring import RingReceiver
from engine.transfer.shm_vm import VmReceiver
from engine.transfer.tcp_read import TcpReceiver

logger = logging.getLogger(__name__)

KvTransfer = Literal["auto", "shm", "tcp", "grpc", "nixl", "shm_vm", "shm_map", "shm_ring"]

_SHM = (Plane.SHM_MAP, Plane.SHM_VM, Plane.SHM_RING)
_WANTED: dict[str, tuple[Plane, ...]] = {
    "auto": (*_SHM, Plane.TCP, Plane.GRPC),
    "shm": _SHM,
    "tcp": (Plane.TCP, Plane.GRPC),
    "grpc": (Plane.GRPC,),
    "nixl": (Plane.NIXL, Plane.TCP, Plane.GRPC),
    "shm_vm": (Plane.SHM_VM,),
    "shm_map": (Plane.SHM_MAP,),
    "shm_ring": (Plane.SHM_RING,),
}


def wanted_planes(kv_transfer: KvTransfer, *, in_device_memory: bool = False) -> tuple[Plane, ...]:
    """Planes that `--kv-transfer` allows, best first.

    Not NIXL to a pool in device memory: a READ that was given up may land later, in staging that others have by then.
    """
    planes = _WANTED[kv_transfer]
    return tuple(plane for plane in planes if plane is not Plane.NIXL) if in_device_memory else planes


def common_planes(
    receiver: Sequence[Plane], sender: Sequence[Plane], *, same_host: bool, allowed: Sequence[Plane]
) -> tuple[Plane, ...]:
    """The receiver's planes, in its order, that the sender has and its own setting allows; shm stays on a host."""
    return tuple(
        plane for plane in receiver if plane in sender and plane in allowed and (same_host or plane not in _SHM)
    )


def boot_id() -> str:
    """The kernel's boot id: equal means the same host. Empty where it cannot be read."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


@dataclass(frozen=True, slots=True)
class Means:
    """What this worker reaches one sender with: its NIXL agent, the sender's host, TLS if they speak it."""

    agent: NixlAgent | None = None
    host: str = "127.0.0.1"
    tls: Callable[[], ssl.SSLContext] | None = None


def open_receiver(
    planes: Sequence[Plane], info: SharedPoolInfo, block_bytes: int, means: Means | None = None
) -> BlockReceiver | None:
    """The first plane that works; None means the bytes come in the Pull stream (gRPC).

    Raises PlaneUnavailable with every reason if none works. Blocks for up to two seconds per plane.
    """
    means, reasons = means or Means(), []
    for plane in planes:
        try:
            if plane is Plane.GRPC:
                return None
            if plane is Plane.NIXL:
                return NixlReceiver(info, block_bytes, _present(means.agent))
            if plane is Plane.TCP:
                return TcpReceiver(info, block_bytes, means.host, means.tls)
            if plane is Plane.SHM_VM:
                return VmReceiver(info, block_bytes)
            if plane is Plane.SHM_MAP:
                return MapReceiver(info, block_bytes)
            return RingReceiver(info, block_bytes)
        except PlaneUnavailable as error:
            logger.info("kv transfer: plane %s does not work with pid %d: %s", plane.name, info.pid, error)
            reasons.append(f"{plane.name}: {error}")
    raise PlaneUnavailable("no plane works: " + ("; ".join(reasons) or "none in common"))


def start_agent(planes: Sequence[Plane], name: str) -> NixlAgent | None:
    """This worker's NIXL agent if one of its planes wants it; None with a log line if it does not start."""
    if Plane.NIXL not in planes:
        return None
    try:
        return NixlAgent(name)
    except PlaneUnavailable as error:
        logger.warning("kv transfer: no plane NIXL, the next one is used: %s", error)
        return None


def _present(agent: NixlAgent | None) -> NixlAgent:
    if agent is None:
        raise PlaneUnavailable("this worker has no NIXL agent")
    return agent
