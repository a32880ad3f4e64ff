"""How busy a process is and what it can take, as gateways are told."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a process is. Tokens are those that its KV pools hold, and could hold."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_used_tokens: int
    num_pool_tokens: int
    max_running: int

    @property
    def kv_usage(self) -> float:
        """Share of the pools that is referenced, 0 … 1."""
        return self.num_used_tokens / self.num_pool_tokens if self.num_pool_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Lengths in tokens."""

    max_model_len: int
    vocab_size: int
