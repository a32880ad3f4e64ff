"""What an installed pagewire has: an editable checkout hides a package that the wheel leaves out."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_wheel_has_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = project["tool"]["setuptools"]["packages"]
    roots = {name.split(".")[0] for name in listed}
    there = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for root in roots
        for path in (ROOT / root).rglob("__init__.py")
        if "build" not in path.parts
    }
    assert set(listed) == there
