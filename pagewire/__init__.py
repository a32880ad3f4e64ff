"""pagewire: large language models as gRPC microservices, with prefill and decode as separate services."""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offline.llm import LLM
    from offline.outputs import CompletionOutput, RequestOutput
    from offline.params import SamplingParams
    from pagewire.client import AsyncClient, Client
    from pagewire.errors import PagewireError
    from pagewire.sampling import StructuredOutput

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncClient",
    "Client",
    "CompletionOutput",
    "PagewireError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "__version__",
]

# Else gRPC's core writes a line to stderr whenever a server says goodbye. It reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

_EXPORTS = {
    "AsyncClient": "pagewire.client",
    "Client": "pagewire.client",
    "PagewireError": "pagewire.errors",
    "LLM": "offline.llm",
    "CompletionOutput": "offline.outputs",
    "RequestOutput": "offline.outputs",
    "SamplingParams": "offline.params",
    "StructuredOutput": "pagewire.sampling",
}


def __getattr__(name: str) -> Any:
    """Imports on first use: a process that needs no client imports no gRPC, and one that needs no engine no torch."""
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'pagewire' has no attribute {name!r}")
