"""A worker failed a request: may another one try, and what is the client told if none may?"""

import re
from dataclasses import dataclass

import grpc

from pagewire.errors import ADAPTER_NOT_FOUND, PagewireError, Unavailable, renamed
from router.placement import Worker

# A worker that says one of these may be lost or busy; anything else is about the request and is passed on.
_RETRYABLE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)


# These say that the worker is full or that the request is to go elsewhere, or they are about the request.
_OF_THE_WORKER = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN})


# Workers' names of fields, in the order in which they are tried, and those of the public API.
_FIELDS = (
    (re.compile(r"^request\.params\.bad_words\b"), "text_options.bad_words"),
    (re.compile(r"^request\.params\."), "sampling."),
    (re.compile(r"^request\."), ""),
)


def in_the_clients_words(error: PagewireError) -> PagewireError:
    """What a worker says of a request, with the names of the fields that its client has filled in."""
    for pattern, name in _FIELDS:
        error = renamed(error, pattern, name)
    return error


@dataclass(frozen=True, slots=True)
class Failure:
    """What the worker said, or what its broken stream amounts to."""

    error: PagewireError
    worker: Worker
    was_prefill: bool

    @property
    def is_retryable(self) -> bool:
        """False if another worker would say the same."""
        return self.error.code in _RETRYABLE or self.lacks_adapter

    @property
    def lacks_adapter(self) -> bool:
        """True if this worker has not, or no longer, the load of an adapter that others may have."""
        return self.error.reason == ADAPTER_NOT_FOUND

    @property
    def is_the_workers_fault(self) -> bool:
        """True if it speaks against the worker's health; its circuit breaker counts these."""
        return self.error.code in _OF_THE_WORKER

    def given_up(self, num_migrations: int) -> PagewireError:
        """After too many failures: says when to try again."""
        if self.error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return self.error
        return Unavailable(f"the request was moved {num_migrations} times and failed again: {self.error.message}")

    def __str__(self) -> str:
        role = "prefill" if self.was_prefill else "decode"
        return f"{role} worker {self.worker.worker_id} failed a request: {self.error.message}"
