"""Who asks what: customers with a system prompt each, users with chats; the same for simulated and real runs."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

T = TypeVar("T")

BLOCK = 64  # tokens; larger than in production, so that runs are short


@dataclass(frozen=True, slots=True)
class Workload:
    """Customers, and what they say; whole blocks of tokens. Each prompt has one token more, which is never cached."""

    working_set: float  # share of the prefill workers' KV
    num_customers: int = 150
    users_per_customer: int = 5
    system_tokens: int = 6016
    question_tokens: int = 192
    answer_tokens: int = 192
    num_turns: int = 4

    @property
    def working_set_tokens(self) -> float:
        """All system prompts and, on average, half of each user's chat."""
        chat = self.num_turns * (self.question_tokens + self.answer_tokens) / 2
        return self.num_customers * (self.system_tokens + self.users_per_customer * chat)

    def blocks_per_worker(self, num_prefill: int) -> int:
        return int(self.working_set_tokens / self.working_set / num_prefill / BLOCK)


@dataclass(slots=True)
class Chat(Generic[T]):
    """A user: all said so far, and the number of turns that began."""

    customer: int
    said: list[T]
    num_turns: int = 0
    busy: bool = False


class Users(Generic[T]):
    """All chats. `say(num_tokens)` makes up something new: token ids, or the keys of the blocks that they fill."""

    def __init__(self, workload: Workload, say: Callable[[int], list[T]]) -> None:
        self._workload = workload
        self._say = say
        self._systems = [say(workload.system_tokens) for _ in range(workload.num_customers)]
        self._chats = [
            Chat(customer, list(system))
            for customer, system in enumerate(self._systems)
            for _ in range(workload.users_per_customer)
        ]

    def ask(self, rng: Random) -> Chat[T]:
        """Somebody's next turn: what was said up to and with the question; the caller adds the answer and ends it."""
        chat = rng.choice(self._chats)
        if chat.busy:  # the load is open: somebody else of the same customer begins a chat
            chat = Chat(chat.customer, list(self._systems[chat.customer]))
        elif chat.num_turns == self._workload.num_turns:
            chat.said, chat.num_turns = list(self._systems[chat.customer]), 0
        chat.num_turns += 1
        chat.busy = True
        chat.said += self._say(self._workload.question_tokens)
        return chat
