"""Which LoRA adapter a request means: by its `adapter`, or by an adapter's name in place of the model's. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from pagewire.errors import ADAPTER_NOT_FOUND, InvalidArgument, NotFound
from pagewire.worker_view import AdapterLabel, AdapterView

_SHOWN, _SHOWN_CHARS = 16, 200


def resolve_adapter(
    adapter: str, model: str, model_name: str, adapters: Mapping[str, AdapterLabel]
) -> AdapterLabel | None:
    """None for the base model. Raises NotFound, or InvalidArgument if two different ones are named."""
    by_model = model if model and model != model_name else ""
    if by_model and by_model not in adapters:
        raise NotFound(
            f"model {by_model[:_SHOWN_CHARS]!r} is not served here; "
            f"known models: {_listed((model_name, *sorted(adapters)))}",
            reason="MODEL_NOT_FOUND",
        )
    if adapter and adapter not in adapters:
        known = f"known adapters: {_listed(sorted(adapters))}" if adapters else "no adapters are served"
        raise NotFound(f"adapter {adapter[:_SHOWN_CHARS]!r} is not known; {known}", reason=ADAPTER_NOT_FOUND)
    if adapter and by_model and adapter != by_model:
        raise InvalidArgument(
            "adapter", adapter, f"must be the adapter that `model` names, {by_model[:_SHOWN_CHARS]!r}, or empty"
        )
    name = adapter or by_model
    return adapters[name] if name else None


def newest(views: Iterable[AdapterView]) -> dict[str, AdapterLabel]:
    """The latest load of each name, without the retired: during a change workers have different ones for a moment."""
    found: dict[str, AdapterLabel] = {}
    for view in views:
        if view.retired:
            continue
        known = found.get(view.label.name)
        if known is None or known.generation < view.label.generation:
            found[view.label.name] = view.label
    return found


class AdapterDirectory:
    """What workers have, in the order that requests ask in; made anew when a worker has told something new."""

    def __init__(self) -> None:
        self._labels: dict[str, tuple[tuple[AdapterView, ...], Mapping[AdapterLabel, AdapterView]]] = {}
        self._told: list[tuple[AdapterView, ...]] = []
        self._newest: Mapping[str, AdapterLabel] = {}

    def find(self, worker_id: str, views: tuple[AdapterView, ...], label: AdapterLabel) -> AdapterView | None:
        """This very load at the worker that has these views; retired ones are found too."""
        told, by_label = self._labels.get(worker_id, (None, {}))
        if told is not views:
            by_label = {view.label: view for view in views}
            self._labels[worker_id] = views, by_label
        return by_label.get(label)

    def newest(self, told: Sequence[tuple[AdapterView, ...]]) -> Mapping[str, AdapterLabel]:
        """By name, from what all workers that serve have told. Without any, it is what the last ones had.

        So a request for an adapter whose workers are gone for a moment waits, or fails, like one for the model.
        """
        if told and (len(told) != len(self._told) or any(a is not b for a, b in zip(told, self._told, strict=True))):
            self._told = list(told)
            self._newest = newest(view for views in told for view in views)
        return self._newest

    def keep_only(self, worker_ids: Collection[str]) -> None:
        """Everybody else is gone."""
        for worker_id in self._labels.keys() - set(worker_ids):
            del self._labels[worker_id]


def _listed(names: Iterable[str]) -> str:
    shown = [repr(name) for name in names]
    return ", ".join(shown[:_SHOWN]) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")
