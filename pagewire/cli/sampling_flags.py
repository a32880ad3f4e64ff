"""Flags for sampling parameters. Values are checked by the server, so that every client hears the same words."""

from typing import Annotated

import typer

_PANEL = "Sampling"

MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", metavar="N", help="Most tokens to generate.", show_default="what fits", rich_help_panel=_PANEL
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature", metavar="T", help="Softmax temperature, 0 is greedy.", show_default="1", rich_help_panel=_PANEL
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        metavar="P",
        help="Nucleus: smallest set with this probability.",
        show_default="1",
        rich_help_panel=_PANEL,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        "--top-k",
        metavar="K",
        help="Keep the K likeliest tokens, 0 keeps all.",
        show_default="0",
        rich_help_panel=_PANEL,
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        "--min-p",
        metavar="P",
        help="Keep tokens with this share of the likeliest's probability.",
        show_default="0",
        rich_help_panel=_PANEL,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", metavar="N", help="Makes the output repeatable.", show_default="random", rich_help_panel=_PANEL
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        metavar="TEXT",
        help="Text that ends the output; may be repeated.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]


def given(**values: float | None) -> dict[str, float]:
    """Those that were given."""
    return {name: value for name, value in values.items() if value is not None}
