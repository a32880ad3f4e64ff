"""Which adapters were loaded at run time, from what workers tell, and who lacks them after a restart. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pagewire.worker_view import AdapterLabel, AdapterView
from router.cost import Process

_MOST_GONE = 4096
_MOST_AWAY = 4096


@dataclass(frozen=True, slots=True)
class Told:
    """A live worker process and the adapters that it tells of."""

    process: Process
    views: tuple[AdapterView, ...]


class AdapterMemory:
    """The newest load of each name, of those that some worker had and that nobody took away.

    A worker process that no longer tells of a load that it had was told to unload it. A process that never had it has
    started since, and lacks it. One that is away for a while is still the same process. Loads of a worker's start
    (generation 0) are that worker's own affair.
    """

    def __init__(self) -> None:
        self._wanted: dict[str, AdapterView] = {}
        self._gone: dict[AdapterLabel, None] = {}
        self._had: dict[Process, frozenset[AdapterLabel]] = {}
        self._paths: dict[tuple[str, AdapterLabel], str] = {}
        """By worker id: a worker that starts anew has the same one."""
        self._seen: dict[Process, tuple[AdapterView, ...]] = {}
        self._settled: set[tuple[Process, AdapterLabel]] = set()
        self._given: set[tuple[Process, AdapterLabel]] = set()
        """Also what is still under way: that the process tells of it then is no news."""
        self._withdrawn: set[tuple[Process, AdapterLabel]] = set()
        self.labels: Mapping[str, AdapterLabel] = {}
        """By name."""

    def wants(self, label: AdapterLabel) -> bool:
        view = self._wanted.get(label.name)
        return view is not None and view.label == label

    def is_over(self, label: AdapterLabel) -> bool:
        """Nobody wants it, nor a newer load, which would replace it."""
        view = self._wanted.get(label.name)
        return view is None or view.label.generation < label.generation

    def observe(self, told: Iterable[Told]) -> dict[Process, list[AdapterView]]:
        """What each process lacks. `told` are all that are alive."""
        views = {each.process: each.views for each in told}
        if any(self._seen.get(process) is not each for process, each in views.items()) or len(views) != len(self._seen):
            self._note(views)
        return {
            process: lacking
            for process in views
            if (
                lacking := [
                    self._as_it_was(process, v) for v in self._wanted.values() if not self._has(process, v.label)
                ]
            )
        }

    def give(self, process: Process, label: AdapterLabel) -> None:
        """It is about to be given the load."""
        self._given.add((process, label))

    def settle(self, process: Process, label: AdapterLabel) -> None:
        """It was given the load, or can't take it: not to be tried again."""
        self._settled.add((process, label))

    def unwanted(self) -> dict[Process, list[AdapterLabel]]:
        """What each process was given and still tells of, although the load was taken back everywhere else.

        It has joined while the load was failing: who made it did not know of the process.
        """
        found: dict[Process, list[AdapterLabel]] = {}
        for process, label in self._given - self._withdrawn:
            if label in self._gone and label in self._had.get(process, ()):
                found.setdefault(process, []).append(label)
        return found

    def withdraw(self, process: Process, label: AdapterLabel) -> None:
        """It was taken back from the process, which may yet tell of it."""
        self._withdrawn.add((process, label))

    def forget(self, name: str) -> bool:
        """The name is unloaded; False if nothing was known of it."""
        view = self._wanted.pop(name, None)
        if view is not None:
            self._bury(view.label)
            self._list()
        return view is not None

    def _has(self, process: Process, label: AdapterLabel) -> bool:
        return label in self._had[process] or (process, label) in self._settled

    def _as_it_was(self, process: Process, view: AdapterView) -> AdapterView:
        """With the path that this worker had it from: workers may have different roots."""
        return replace(view, path=self._paths.get((process[0], view.label), view.path))

    def _note(self, views: dict[Process, tuple[AdapterView, ...]]) -> None:
        here: dict[AdapterLabel, AdapterView] = {}
        for process, told in views.items():
            now = {view.label: view for view in told if view.label.generation and not view.retired}
            here |= now
            self._paths |= {(process[0], label): view.path for label, view in now.items()}
            had = self._had.get(process)
            for label in (had or frozenset()) - now.keys():
                self._bury(label)
                self._given.discard((process, label))  # if it has it once more, that is somebody's doing
                self._settled.discard((process, label))
                self._withdrawn.discard((process, label))
            if had is not None:  # somebody has loaded it now, and not again only
                for label in now.keys() - had:
                    if (process, label) not in self._given:
                        self._gone.pop(label, None)
            self._had.pop(process, None)
            self._had[process] = frozenset(now)  # those that are away the longest come first
        for label, view in here.items():
            known = self._wanted.get(label.name)
            if label not in self._gone and (known is None or known.label.generation < label.generation):
                self._wanted[label.name] = view
        self._wanted = {name: view for name, view in self._wanted.items() if view.label not in self._gone}
        for label, view in here.items():  # what a load that was taken back had replaced
            if label not in self._gone:
                self._wanted.setdefault(label.name, view)
        self._list()
        self._paths = {(worker, label): path for (worker, label), path in self._paths.items() if self.wants(label)}
        self._forget_processes(views)
        self._forget_loads()
        self._seen = dict(views)

    def _forget_processes(self, views: Mapping[Process, object]) -> None:
        """Whose worker has started anew, and of the others that are away all but the latest."""
        here = {worker_id for worker_id, _ in views}
        away = [process for process in self._had if process not in views and process[0] not in here]
        kept = {*views, *away[-_MOST_AWAY:]}
        self._had = {process: had for process, had in self._had.items() if process in kept}
        self._settled = {each for each in self._settled if each[0] in kept}
        self._given = {each for each in self._given if each[0] in kept}
        self._withdrawn = {each for each in self._withdrawn if each[0] in kept}

    def _forget_loads(self) -> None:
        """Those that no question is about any more: a process may live through any number of them.

        One that is under way to a process is not over, though a newer one may be wanted already.
        """
        self._given = {each for each in self._given if self._matters(*each) or each not in self._settled}
        self._settled = {each for each in self._settled if self.wants(each[1]) or each in self._given}
        self._withdrawn = {each for each in self._withdrawn if self._matters(*each)}

    def _matters(self, process: Process, label: AdapterLabel) -> bool:
        """It is wanted, or it was taken away, or the process has it."""
        return self.wants(label) or label in self._gone or label in self._had.get(process, ())

    def _list(self) -> None:
        self.labels = {name: view.label for name, view in self._wanted.items()}

    def _bury(self, label: AdapterLabel) -> None:
        self._gone[label] = None
        while len(self._gone) > _MOST_GONE:
            del self._gone[next(iter(self._gone))]
