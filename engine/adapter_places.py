"""Which adapters run: at most as many as the device has slots. Pure."""

from collections.abc import Iterable

from engine.sequence import Sequence


class AdapterPlaces:
    """The places of one step's admissions. Sequences of the base model need none.

    Once one waits for a place, no sequence with an adapter is let in behind it, not even one whose adapter runs: else
    a stream of requests for the adapters that run would keep it waiting for ever.
    """

    def __init__(self, max_loras: int, running: Iterable[Sequence]) -> None:
        self._max_loras = max_loras
        self._keys = {sequence.request.adapter_key for sequence in running} - {b""}
        self._is_held_up = False

    def admits(self, sequence: Sequence) -> bool:
        """Whether it may run now; if not, it is remembered."""
        key = sequence.request.adapter_key
        if not key:
            return True
        if not self._is_held_up and key not in self._keys:
            self._is_held_up = len(self._keys) >= self._max_loras
        return not self._is_held_up

    def take(self, sequence: Sequence) -> None:
        """It runs."""
        if key := sequence.request.adapter_key:
            self._keys.add(key)


def names_of_adapters(sequences: Iterable[Sequence]) -> tuple[str, ...]:
    """Sorted, each once."""
    adapters = (sequence.request.adapter for sequence in sequences)
    return tuple(sorted({adapter.name for adapter in adapters if adapter is not None}))
