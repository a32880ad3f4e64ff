"""What the workers of `index.py` hold, the prompts that are looked up, and the script of a layout it compares with."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

PROMPT_BLOCKS, SHARED_BLOCKS = 512, 128

LUA_WALK = """
local alive, left, depths = {}, #ARGV, {}
for w = 1, #ARGV do alive[ARGV[w]] = true; depths[ARGV[w]] = 0 end
for k = 1, #KEYS do
  local held = {}
  for _, name in ipairs(redis.call('HKEYS', KEYS[k])) do held[name] = true end
  for name in pairs(alive) do
    if held[name] then depths[name] = k else alive[name] = nil; left = left - 1 end
  end
  if left == 0 then break end
end
local answer = {}
for w = 1, #ARGV do answer[w] = depths[ARGV[w]] end
return answer
"""


@dataclass(frozen=True, slots=True)
class World:
    """What `num_workers` hold: by worker, keys in prompt order; and prompts to look up, by kind."""

    worker_ids: list[str]
    held: dict[str, list[bytes]]
    prompts: dict[str, list[list[bytes]]]

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.held.values()))

    @classmethod
    def make(cls, num_workers: int, blocks_per_worker: int, rng: Random) -> "World":
        worker_ids = [f"worker-{number}" for number in range(num_workers)]
        groups = [make_chain(SHARED_BLOCKS) for _ in range(max(4, num_workers // 2))]
        own = {worker_id: dict[bytes, None]() for worker_id in worker_ids}
        mixed: list[list[bytes]] = []
        for holder in own.values():
            while len(holder) < blocks_per_worker:
                if mixed and rng.random() < 0.3:  # the beginning of somebody else's
                    prompt = rng.choice(mixed)
                    holder |= dict.fromkeys(prompt[: rng.randint(1, PROMPT_BLOCKS)])
                else:
                    prompt = rng.choice(groups) + make_chain(PROMPT_BLOCKS - SHARED_BLOCKS)
                    mixed.append(prompt)
                    holder |= dict.fromkeys(prompt)
        ragged = [make_chain(PROMPT_BLOCKS) for _ in range(4 if num_workers <= 64 else 1)]
        for prompt in ragged:
            for holder in own.values():
                holder |= dict.fromkeys(prompt[: rng.randint(1, PROMPT_BLOCKS)])
        prompts = {
            "mixed": rng.sample(mixed, min(200, len(mixed))),
            "cold": [make_chain(PROMPT_BLOCKS)],
            "ragged": ragged,
        }
        return cls(worker_ids, {name: list(keys) for name, keys in own.items()}, prompts)


def make_chain(length: int) -> list[bytes]:
    return [os.urandom(16) for _ in range(length)]


def fresh(prompt: Sequence[bytes]) -> list[bytes]:
    """As a request brings them: equal to what is held, but other objects, whose hashes are not known yet."""
    return [bytes(bytearray(key)) for key in prompt]
