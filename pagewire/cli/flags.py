"""Flags made from the option models, so that type, limit, default and help text are written once."""

import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo


def fields_of(*classes: type[BaseModel]) -> dict[str, FieldInfo]:
    """All fields that are flags, by name; where two classes have the same, the first one's."""
    fields: dict[str, FieldInfo] = {}
    for cls in classes:
        for name, field in cls.model_fields.items():
            if isinstance(field.json_schema_extra, dict):
                fields.setdefault(name, field)
    return fields


def _kinds(annotation: Any) -> list[Any]:
    """The type itself, or those of one that may be left out."""
    arguments = get_args(annotation)
    return list(arguments) if type(None) in arguments else [annotation]


def _choices(annotation: Any) -> tuple[str, ...]:
    return next((get_args(kind) for kind in _kinds(annotation) if get_origin(kind) is Literal), ())


def _limits(field: FieldInfo) -> str:
    """The range of a number that has an upper end: "1 … 256", "over 0, at most 1"."""
    metadata = [*field.metadata]
    for kind in _kinds(field.annotation):
        for each in getattr(kind, "__metadata__", ()):
            metadata += getattr(each, "metadata", [each])
    found = {name: getattr(each, name) for each in metadata for name in ("ge", "gt", "le", "lt") if hasattr(each, name)}
    if "le" in found:
        return f"{found['ge']} … {found['le']}" if "ge" in found else f"over {found['gt']}, at most {found['le']}"
    return f"{found['ge']} … less than {found['lt']}" if {"ge", "lt"} <= found.keys() else ""


def _parameter(name: str, field: FieldInfo, *, can_switch_off: bool) -> inspect.Parameter:
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    flag = f"--{name.replace('_', '-')}"
    is_switch = bool in _kinds(field.annotation)
    can_switch_off = can_switch_off or field.default is None  # what is neither on nor off has two ways to be set
    choices = _choices(field.annotation)
    default = str(extra["shown_default"])
    if not default and field.default not in (None, ()):
        default = ("off", "on")[field.default] if is_switch else str(field.default)
    # Choices go into the text: as a metavar they would take the column that the flags' names need at 80 characters.
    help_text = str(field.description)
    if values := "|".join(choices) or _limits(field):
        help_text += f" [dim]{values}[/dim]"
    if field.is_required():
        help_text += " [dim]\\[required][/dim]"
    elif default and (can_switch_off or not is_switch):
        help_text += f" [dim]\\[default: {default}][/dim]"
    option = typer.Option(
        *(f"{flag}/--no-{flag[2:]}" if is_switch and can_switch_off else flag, *filter(None, [str(extra["short"])])),
        help=help_text,
        rich_help_panel=str(extra["panel"]),
        metavar="" if is_switch else ("CHOICE" if choices else str(extra["metavar"])),
        show_default=False,
    )
    # Everything is text and optional here: the model checks values, after the environment and the file had their say.
    kind: Any = Annotated[bool | None, option] if is_switch else Annotated[str | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def with_flags(
    fields: dict[str, FieldInfo], *, without: Iterable[str] = (), can_switch_off: bool = True
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Adds one flag per field to a command, which gets them as keyword arguments; None means not given.

    `can_switch_off`: switches have a --no- form, for what a file or the environment may have switched on.
    """
    leave_out = frozenset(without)

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        own = [p for p in inspect.signature(command).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        made = [
            _parameter(name, field, can_switch_off=can_switch_off)
            for name, field in fields.items()
            if name not in leave_out
        ]
        made.sort(key=lambda parameter: _panel(fields[parameter.name]))
        signature = inspect.Signature([*own, *made])
        command.__signature__ = signature  # type: ignore[attr-defined]
        return command

    return decorate


def _panel(field: FieldInfo) -> int:
    order = (
        "Model",
        "Network",
        "Engine",
        "Prefix cache",
        "Routing",
        "KV transfer",
        "Admission and shutdown",
        "Security",
        "Load",
        "Dataset",
        "Sampling",
        "Result",
    )
    extra = field.json_schema_extra
    panel = extra["panel"] if isinstance(extra, dict) else ""
    return order.index(str(panel)) if panel in order else len(order)
