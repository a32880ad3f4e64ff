"""What both endpoints make of a request: one call of the pipeline for each prompt."""

import re
from collections.abc import Mapping
from uuid import uuid4

from pagewire.sampling import SamplingParams
from router.http.requests import GenerationRequest
from router.request import GenerateCall, Prompt
from router.service import MAX_LABEL_LENGTH


def call_of(
    asked: GenerationRequest,
    prompt: Prompt,
    sampling: SamplingParams,
    request_id: str,
    headers: Mapping[str, str],
    *,
    best_of: int | None = None,
    beam_width: int = 1,
) -> GenerateCall:
    """The headers are those that gRPC clients send as metadata."""
    return GenerateCall(
        prompt=prompt,
        sampling=sampling,
        text_options=asked.text_options(),
        model=asked.model,
        cache_salt=asked.cache_salt,
        priority=asked.priority,
        client_request_id=request_id,
        tenant=headers.get("x-tenant", "")[:MAX_LABEL_LENGTH],
        traceparent=headers.get("traceparent", "")[:MAX_LABEL_LENGTH],
        session_id=headers.get("x-session-id", "")[:MAX_LABEL_LENGTH],
        truncate_prompt_tokens=asked.truncate_prompt_tokens,
        best_of=best_of,
        beam_search=asked.beam_search(beam_width),
    )


def request_id_of(asked: GenerationRequest, headers: Mapping[str, str]) -> str:
    """The client's own name for its request, or a new one."""
    name = asked.request_id or headers.get("x-request-id", "")
    # It comes back in a header.
    return name if re.fullmatch(r"[!-~]+", name) else uuid4().hex
