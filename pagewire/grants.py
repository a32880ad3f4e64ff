"""What a caller may call: methods fall into three areas, and a token is granted some of them.

    inference   what is for clients: InferenceService, HTTP under /v1, other people's protocols on the router
    admin       AdminService, and what else changes, or tells of, more than the caller's own
    internal    what routers and workers say to each other; everything that is not listed here

Health needs no token, reflection any. A token file has one token per line, optionally followed by its areas:

    s3cret-of-the-processes
    s3cret-of-the-web-shop   inference
    # lines like this one are comments
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pagewire.config import ConfigError
from pagewire.tls import read_file

INFERENCE, ADMIN, INTERNAL = "inference", "admin", "internal"
AREAS = frozenset((INFERENCE, ADMIN, INTERNAL))
_VLLM_ENGINE = "vllm.grpc.engine.VllmEngine"
# Areas of services, and of methods, which win.
AREAS_EVERYWHERE: Mapping[str, str] = {
    "pagewire.v1.InferenceService": INFERENCE,
    "pagewire.v1.AdminService": ADMIN,
    "inference.GRPCInferenceService": INFERENCE,
}
# On a worker VllmEngine is internal: whoever calls its Generate names the peer that KV is pulled from.
AREAS_ON_ROUTER: Mapping[str, str] = {
    **AREAS_EVERYWHERE,
    _VLLM_ENGINE: INFERENCE,
    f"{_VLLM_ENGINE}/FlushCache": ADMIN,
    f"{_VLLM_ENGINE}/SubscribeKvEvents": ADMIN,  # token ids and cache salts of everybody
    f"{_VLLM_ENGINE}/StartProfile": ADMIN,
    f"{_VLLM_ENGINE}/StopProfile": ADMIN,
}


@dataclass(frozen=True, slots=True)
class Grant:
    """A token and the areas that it opens."""

    token: str
    areas: frozenset[str] = AREAS


def area_of(method: str, areas: Mapping[str, str] = AREAS_EVERYWHERE) -> str | None:
    """The area of "service/method"; None is any caller who has shown a valid token."""
    if method.startswith("grpc.reflection."):
        return None
    return areas.get(method) or areas.get(method.rpartition("/")[0], INTERNAL)


def read_grants(path: Path) -> tuple[Grant, ...]:
    """At least one; raises ConfigError naming file and line."""
    content = read_file(path, "auth_token_file") or b""
    grants = []
    for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
        token, *areas = line.split() or [""]
        if not token or token == "#":
            continue
        if unknown := sorted(set(areas) - AREAS):
            allowed = ", ".join(sorted(AREAS))
            raise ConfigError(
                f"auth_token_file = {str(path)!r}: line {number} grants {unknown[0]!r}, must be of {allowed}"
            )
        grants.append(Grant(token, frozenset(areas) or AREAS))
    if not grants:
        raise ConfigError(f"auth_token_file = {str(path)!r}: has no token")
    return tuple(grants)
