"""How the supported families write tool calls: recognized by the chat template, demanded as a grammar.

hermes   <tool_call>{"name": …, "arguments": {…}}</tool_call>     Qwen, Hermes
llama3   {"name": …, "parameters": {…}}                           Llama 3.1 and later
mistral  [TOOL_CALLS][{"name": …, "arguments": {…}}]              Mistral
"""

import json
from collections.abc import Mapping, Sequence
from typing import Literal

from pagewire.errors import InvalidArgument
from pagewire.sampling import StructuredOutput
from pagewire.text.chat_template import ChatTemplateError
from pagewire.text.tokenizer import Tokenizer

ToolFormat = Literal["hermes", "llama3", "mistral"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MISTRAL_TAG = "[TOOL_CALLS]"
THINK, END_THINK = "<think>", "</think>"
MAX_TOOLS = 128
_MAX_NAME = 64


def tool_format_of(tokenizer: Tokenizer) -> ToolFormat | None:
    """None if the model's template shows no tools."""
    source = "" if tokenizer.chat_template is None else tokenizer.chat_template.source
    if "tools" not in source:
        return None
    if MISTRAL_TAG in source:
        return "mistral"
    return "llama3" if PYTHON_TAG in source or '"parameters":' in source else "hermes"


def has_reasoning(tokenizer: Tokenizer) -> bool:
    """The model thinks in <think> … </think> before it answers."""
    source = "" if tokenizer.chat_template is None else tokenizer.chat_template.source
    return THINK in source or tokenizer.token_id(THINK) is not None


def prompt_opens_thought(tokenizer: Tokenizer) -> bool:
    """The template itself writes the <think> with which an answer begins."""
    if tokenizer.chat_template is None or not has_reasoning(tokenizer):
        return False
    try:
        text = tokenizer.chat_template.render([{"role": "user", "content": "?"}])
    except ChatTemplateError:
        return False  # it wants other messages
    return text.rstrip().endswith(THINK)


def check_tools(tools: Sequence[Mapping[str, object]]) -> list[str]:
    """The functions' names; raises InvalidArgument for what is no list of functions."""
    if len(tools) > MAX_TOOLS:
        raise InvalidArgument("tools", len(tools), f"must be at most {MAX_TOOLS}")
    names: list[str] = []
    for number, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping):
            raise InvalidArgument(f"tools[{number}]", None, 'must be {"type": "function", "function": {…}}')
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not 1 <= len(name) <= _MAX_NAME or name in names:
            limit = f"must be a name of its own with 1 … {_MAX_NAME} characters"
            raise InvalidArgument(f"tools[{number}].function.name", name if isinstance(name, str) else None, limit)
        if parameters is not None and not isinstance(parameters, Mapping):
            raise InvalidArgument(f"tools[{number}].function.parameters", None, "must be a JSON Schema")
        names.append(name)
    return names


def demanded(
    style: ToolFormat, tools: Sequence[Mapping[str, object]], *, only: str | None, parallel: bool
) -> StructuredOutput:
    """A grammar of at least one call (`only` of that function; without `parallel` just one), and nothing else."""
    schemas = [_call_schema(style, tool) for tool in tools if only in (None, _function(tool)["name"])]
    one = json.dumps(schemas[0] if len(schemas) == 1 else {"anyOf": schemas})
    rest = " more*" if parallel and only is None else ""
    if style == "hermes":
        lark = f'start: call{rest}\nmore: "\\n" call\ncall: "{OPEN}\\n" body "\\n{CLOSE}"\nbody: %json {one}'
    elif style == "llama3":
        lark = f'start: body{rest}\nmore: "; " body\nbody: %json {one}'
    else:
        most = {} if rest else {"maxItems": 1}
        listed = json.dumps({"type": "array", "items": json.loads(one), "minItems": 1, **most})
        lark = f'start: "{MISTRAL_TAG}" body\nbody: %json {listed}'
    return StructuredOutput("grammar", lark)


def _call_schema(style: ToolFormat, tool: Mapping[str, object]) -> dict[str, object]:
    function = _function(tool)
    arguments = "parameters" if style == "llama3" else "arguments"
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            arguments: function.get("parameters") or {"type": "object"},
        },
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _function(tool: Mapping[str, object]) -> Mapping[str, object]:
    function = tool["function"]
    assert isinstance(function, Mapping)
    return function
