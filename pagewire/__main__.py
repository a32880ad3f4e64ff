"""`python -m pagewire` is the `pagewire` command."""

from pagewire.cli import main

main()
