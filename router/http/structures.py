"""Structured output in the forms in which clients ask for it: OpenAI's response_format, vLLM's structured_outputs."""

import json
from collections.abc import Mapping

from pagewire.errors import InvalidArgument
from pagewire.sampling import StructuredOutput

# Options of vLLM's that change nothing here unless they are set.
_OPTIONS = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern",
            "structural_tag")  # fmt: skip


def structure_of(
    response_format: Mapping[str, object] | None,
    structured_outputs: Mapping[str, object] | None,
    guided: Mapping[str, object],
) -> StructuredOutput | None:
    """None if nothing is asked for; raises InvalidArgument for two ways at once and for unknown forms."""
    found: dict[str, StructuredOutput] = {}
    if response_format and (structure := _of_format(response_format)) is not None:
        found["response_format"] = structure
    if structured_outputs and (structure := _of_outputs(structured_outputs)) is not None:
        found["structured_outputs"] = structure
    for name, value in guided.items():
        if value is not None:
            found[name] = _structure(name, name.removeprefix("guided_"), value)
    if len(found) > 1:
        first, second, *_ = found
        raise InvalidArgument(second, None, f"is not supported together with {first}")
    return next(iter(found.values()), None)


def _of_format(value: Mapping[str, object]) -> StructuredOutput | None:
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput("json_object")
    if kind != "json_schema":
        raise InvalidArgument("response_format.type", kind, "must be text, json_object or json_schema")
    wrapped = value.get("json_schema")
    schema = wrapped.get("schema") if isinstance(wrapped, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InvalidArgument("response_format.json_schema.schema", None, "must be a JSON Schema")
    return StructuredOutput("json_schema", json.dumps(schema))


def _of_outputs(value: Mapping[str, object]) -> StructuredOutput | None:
    given = {name: item for name, item in value.items() if item is not None and item is not False}
    for name in _OPTIONS:
        if name in given:
            raise InvalidArgument(f"structured_outputs.{name}", None, "is not supported")
    if not given:
        return None
    if len(given) > 1:
        raise InvalidArgument("structured_outputs", None, f"must have one constraint, has {', '.join(sorted(given))}")
    ((name, item),) = given.items()
    return _structure(f"structured_outputs.{name}", name, item)


def _structure(field: str, name: str, value: object) -> StructuredOutput:
    if name == "json" and isinstance(value, str | Mapping):
        return StructuredOutput("json_schema", value if isinstance(value, str) else json.dumps(value))
    if name == "json_object" and value is True:
        return StructuredOutput("json_object")
    if name == "choice" and isinstance(value, list) and all(isinstance(text, str) for text in value):
        return StructuredOutput("choice", choices=tuple(value))
    if name == "regex" and isinstance(value, str):
        return StructuredOutput("regex", value)
    if name == "grammar" and isinstance(value, str):
        return StructuredOutput("grammar", value)
    raise InvalidArgument(field, None, "is no constraint of a known form")
