"""The `kv_transfer_params` by which a gateway takes KV from a prefill worker's answer to a decode worker's request.

The gateway tags the prefill request, and carries what comes back as it is:

    prefill request   {"do_remote_decode": true}                        keep the KV for somebody
    its answer        {"do_remote_prefill": true, "pagewire": {...}}    where it is, and the first token
    decode request    the same                                          fetch it

These are the words of vLLM's NixlConnector, which is what gateways know; the transfer itself is pagewire's own.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagewire.errors import InvalidArgument
from pagewire.foreign.smg import vllm_engine_pb2 as pb

_FIELD = "kv_transfer_params_json"
MAX_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What the prefill worker sampled; `top` is (token id, logprob)."""

    token_id: int
    logprob: float | None = None
    rank: int = 0
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RemoteKv:
    """A prompt's KV at a prefill worker: the ticket, whose it is, and how the prompt went on."""

    endpoint: str
    worker_id: str
    incarnation: int
    ticket: bytes
    seed: int
    num_prompt_tokens: int
    num_cached_tokens: int
    first_token: FirstToken


@dataclass(frozen=True, slots=True)
class HandOff:
    """What a request says: keep the KV (`keep`), or fetch it (`source`)."""

    keep: bool = False
    source: RemoteKv | None = None


def hand_off_from_request(request: pb.GenerateRequest) -> HandOff | None:
    """None if the request says nothing of a transfer. Raises InvalidArgument."""
    if not request.HasField("kv_transfer_params_json"):
        return None
    if len(request.kv_transfer_params_json) > MAX_BYTES:
        raise InvalidArgument(_FIELD, None, f"must have at most {MAX_BYTES} bytes")
    try:
        params = json.loads(request.kv_transfer_params_json)
    except (ValueError, RecursionError):
        raise InvalidArgument(_FIELD, request.kv_transfer_params_json, "must be a JSON object") from None
    if not isinstance(params, dict):
        raise InvalidArgument(_FIELD, request.kv_transfer_params_json, "must be a JSON object")
    keep = params.get("do_remote_decode") is True
    if params.get("do_remote_prefill") is not True:
        return HandOff(keep=keep) if keep else None
    if keep:
        raise InvalidArgument(_FIELD, None, "do_remote_decode and do_remote_prefill cannot both be true")
    return HandOff(source=_remote_from_json(params.get("pagewire")))


def hand_off_to_json(kv: RemoteKv) -> str:
    """What a prefill worker answers. 64-bit numbers are text, since JSON's are not exact."""
    first = kv.first_token
    own = {
        "endpoint": kv.endpoint,
        "worker_id": kv.worker_id,
        "incarnation": str(kv.incarnation),
        "ticket": kv.ticket.hex(),
        "seed": str(kv.seed),
        "num_prompt_tokens": kv.num_prompt_tokens,
        "num_cached_tokens": kv.num_cached_tokens,
        "first_token": {
            "token_id": first.token_id,
            "logprob": first.logprob,
            "rank": first.rank,
            "top": [list(each) for each in first.top],
        },
    }
    return json.dumps({"do_remote_prefill": True, "do_remote_decode": False, "pagewire": own})


def _remote_from_json(own: object) -> RemoteKv:
    """Nothing in it is trusted: it has been through other hands."""
    if not isinstance(own, Mapping):
        raise InvalidArgument(_FIELD, None, "has no object 'pagewire': it is not of a pagewire prefill worker")
    try:
        first: Mapping[str, Any] = own["first_token"]
        logprob = first["logprob"]
        return RemoteKv(
            endpoint=str(own["endpoint"]),
            worker_id=str(own["worker_id"]),
            incarnation=_count(own["incarnation"]),
            ticket=bytes.fromhex(own["ticket"]),
            seed=_count(own["seed"]),
            num_prompt_tokens=_count(own["num_prompt_tokens"]),
            num_cached_tokens=_count(own["num_cached_tokens"]),
            first_token=FirstToken(
                _count(first["token_id"]),
                None if logprob is None else float(logprob),
                _count(first["rank"]),
                tuple((_count(token_id), float(value)) for token_id, value in first["top"]),
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{_FIELD}.pagewire", None, f"is damaged: {error!r}") from None


def _count(value: object) -> int:
    number = int(value) if isinstance(value, str | int) else -1
    if not 0 <= number < 2**64:
        raise ValueError(f"{value!r} is not in 0 … 2**64-1")
    return number
