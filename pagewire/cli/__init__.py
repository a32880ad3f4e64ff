"""The `pagewire` command. Torch-free, and each command imports what it needs only when it runs."""

import sys
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and exits with its code."""
    from pagewire.cli.app import run

    sys.exit(run(sys.argv[1:] if arguments is None else list(arguments)))
