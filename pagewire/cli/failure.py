"""The exception by which a command says in one line why it failed."""


class CommandFailed(Exception):
    """Printed as `error: <text>`; the exit code is 1."""
