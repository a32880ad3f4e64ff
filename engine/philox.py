"""Counter-based noise: Philox4x32-10 over (vocabulary id, position, choice, domain), exact integers, numpy only.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC'11). One call of Philox gives four
32-bit words; a token takes word `vocab_id % 4` of

    counter = (vocab_id // 4, position, choice, domain)      key = (seed's low 32 bits, seed's high 32 bits)

Noise is therefore a function of (seed, position, choice, token) alone: batch, order and process do not matter.
Golden vectors for other languages: `protos/pagewire/v1/philox.json`.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Word = NDArray[np.uint64] | np.uint64  # 32-bit values; a scalar stands for the same word in every lane

DOMAIN_TOKEN = 0  # noise of sampled tokens; drafts use the same noise, so that they are accepted when equal

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_MASK = 0xFFFFFFFF
_HALF, _LOW = np.uint64(32), np.uint64(_MASK)
_LANES = 8192  # 64 KiB per word: all six of a round stay in the L2 cache (1.8 ms for 65536 counters, 2.8 with 16384)

MAX_GUMBEL = float(-np.log(-np.log1p(-(0.5**33))))  # 22.87: no noise is larger


class NoiseKey(NamedTuple):
    """Everything the noise of one sampled position depends on, besides the token."""

    seed: int
    position: int
    choice: int
    domain: int = DOMAIN_TOKEN


def philox4x32(counter: tuple[Word, Word, Word, Word], key: tuple[int, int]) -> tuple[Word, Word, Word, Word]:
    """Ten rounds of Philox4x32. Words are 32-bit values in uint64 lanes, so that a product is exact."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    product0, product1, *lanes = np.empty((6, *np.broadcast_shapes(*map(np.shape, counter))), dtype=np.uint64)
    for _ in range(_NUM_ROUNDS):  # in place: no temporaries
        np.multiply(c0, _MULTIPLIERS[0], out=product0)
        np.multiply(c2, _MULTIPLIERS[1], out=product1)
        _mix(product1, c1, k0, lanes[0])
        _mix(product0, c3, k1, lanes[2])
        np.bitwise_and(product1, _LOW, out=lanes[1])
        np.bitwise_and(product0, _LOW, out=lanes[3])
        c0, c1, c2, c3 = lanes
        k0 = (k0 + _KEY_STEPS[0]) & _MASK
        k1 = (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def _mix(product: NDArray[np.uint64], word: Word, key: int, out: NDArray[np.uint64]) -> None:
    """out = the product's high half ^ word ^ key."""
    np.right_shift(product, _HALF, out=out)
    np.bitwise_xor(out, word, out=out)
    np.bitwise_xor(out, np.uint64(key), out=out)


def words(key: NoiseKey, token_ids: NDArray[np.int64]) -> NDArray[np.uint32]:
    """The 32-bit word of each token in `token_ids`: [num_tokens] uint32."""
    out = np.empty(len(token_ids), dtype=np.uint32)
    for start in range(0, len(token_ids), _LANES):
        ids = token_ids[start : start + _LANES]
        block = _blocks(key, (ids >> 2).astype(np.uint64))
        out[start : start + _LANES] = block[ids & 3, np.arange(len(ids))]
    return out


def all_words(key: NoiseKey, vocab_size: int) -> NDArray[np.uint32]:
    """The words of the whole vocabulary, four a Philox call: [vocab_size] uint32. Equals `words(key, arange)`."""
    num_counters = -(-vocab_size // 4)
    out = np.empty((num_counters, 4), dtype=np.uint32)
    for start in range(0, num_counters, _LANES):
        stop = min(start + _LANES, num_counters)
        out[start:stop] = _blocks(key, np.arange(start, stop, dtype=np.uint64)).T
    return out.reshape(-1)[:vocab_size]


def _blocks(key: NoiseKey, groups: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """All four words of each counter group: [4, num_groups]."""
    position, choice, domain = (np.uint64(word & _MASK) for word in (key.position, key.choice, key.domain))
    counter = (groups, position, choice, domain)
    out = np.empty((4, len(groups)), dtype=np.uint32)
    for word, lanes in enumerate(philox4x32(counter, (key.seed & _MASK, (key.seed >> 32) & _MASK))):
        out[word] = lanes
    return out


def uniform(raw: NDArray[np.uint32]) -> NDArray[np.float64]:
    """u = (word + 1/2) / 2^32, exact in float64 and strictly inside (0, 1)."""
    return (raw.astype(np.float64) + 0.5) * 2.0**-32


def gumbel(raw: NDArray[np.uint32]) -> NDArray[np.float64]:
    """g = -ln(-ln u): argmax(logits + g) is a draw from softmax(logits)."""
    drawn: NDArray[np.float64] = -np.log(-np.log(uniform(raw)))
    return drawn
