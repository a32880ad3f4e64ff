"""Who calls: what keeps one caller's requests from another that knows their ids."""

import base64
import binascii
import hashlib
import json
from dataclasses import dataclass
from typing import Any

import grpc

from pagewire.security import AUTHORIZATION

MAX_TENANT_LENGTH = 128


@dataclass(frozen=True, slots=True)
class Caller:
    """`subject`: whose token it is, as a digest; `tenant`: x-tenant of the metadata. Empty is what was not sent."""

    subject: str = ""
    tenant: str = ""


def caller_of(context: "grpc.aio.ServicerContext[Any, Any]") -> Caller:
    """Of a call whose token, if tokens are asked for, was checked before."""
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    return Caller(_subject(metadata.get(AUTHORIZATION, "")), metadata.get("x-tenant", "")[:MAX_TENANT_LENGTH])


def _subject(authorization: str) -> str:
    """JWTs are renewed while a request runs, so of one that names its subject that is taken, and not the token."""
    token = authorization.partition(" ")[2].strip()
    if not token:
        return ""
    try:
        payload = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        identity = json.dumps([claims.get("iss"), claims["sub"]])
    except (IndexError, ValueError, KeyError, AttributeError, TypeError, binascii.Error):
        identity = token
    return hashlib.sha256(identity.encode()).hexdigest()
