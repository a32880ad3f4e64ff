"""Planted bugs: a copy of a kernel's file with one piece of its text replaced. The file's test must go red on it."""

import importlib.util
from pathlib import Path
from types import ModuleType


def mutant(module: ModuleType, old: str, new: str, directory: Path) -> ModuleType:
    """A fresh module from `module`'s text with `old`, which must be there, replaced by `new`."""
    text = Path(str(module.__file__)).read_text()
    if old not in text:
        raise ValueError(f"{module.__name__} has no {old!r}")
    name = f"{module.__name__.rpartition('.')[2]}_mutant"
    path = directory / f"{name}.py"
    path.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
