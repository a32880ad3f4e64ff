"""A model's chat template, rendered by jinja2 in a sandbox, with the helpers that published templates expect."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

# A template may loop; what it can loop over and what it can print is bounded.
MAX_RANGE = 100_000
MAX_RENDERED_CHARS = 16 * 1024 * 1024


class ChatTemplateError(ValueError):
    """The template refuses these messages, is broken, or makes too much text."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Forbids what could eat memory in one step: huge ranges, huge repetitions and powers."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: object, right: object) -> object:
        size = max((len(v) for v in (left, right) if isinstance(v, str | bytes | list | tuple)), default=0)
        count = max((v for v in (left, right) if isinstance(v, int)), default=0)
        if size * count > MAX_RENDERED_CHARS:
            raise ChatTemplateError(f"the template repeats {size} items {count} times")
        if operator == "**" and (count > 1024 or max(_bits(left), _bits(right)) > 4096):
            raise ChatTemplateError("the template raises a number to a huge power")
        if operator == "*" and _bits(left) + _bits(right) > 1 << 16:
            raise ChatTemplateError("the template multiplies huge numbers")
        return super().call_binop(context, operator, left, right)


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _raise_exception(message: object) -> NoReturn:
    raise ChatTemplateError(str(message))


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without jinja2's HTML escapes, as Hugging Face does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _bounded_range(*arguments: int) -> range:
    numbers = range(*arguments)
    if len(numbers) > MAX_RANGE:
        raise ChatTemplateError(f"the template asks for a range of {len(numbers)}, the limit is {MAX_RANGE}")
    return numbers


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what a model is trained on; for rendering it is nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: "jinja2.parser.Parser") -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. `special_tokens` are its variables bos_token, eos_token, …"""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals.update(
            raise_exception=_raise_exception,
            strftime_now=lambda form: now().strftime(form),
            range=_bounded_range,
        )
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template is broken: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text. Raises ChatTemplateError with the template's own message if it refuses."""
        context: dict[str, object] = {"tools": None, "documents": None, **self._special_tokens, **(variables or {})}
        context.update(messages=[dict(message) for message in messages], add_generation_prompt=add_generation_prompt)
        parts, size = [], 0
        try:
            for part in self._template.generate(context):
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED_CHARS:
                    raise ChatTemplateError(f"the chat template makes more than {MAX_RENDERED_CHARS} characters")
        except ChatTemplateError:
            raise
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ChatTemplateError(f"the chat template failed: {error}") from error
        return "".join(parts)
