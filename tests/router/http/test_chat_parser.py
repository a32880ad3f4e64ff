"""Reasoning and tool calls out of text, however it is cut into pieces."""

import json
import random

import pytest

from pagewire.grammar import GrammarCompiler
from pagewire.text.chat_template import ChatTemplate
from pagewire.text.tokenizer import Tokenizer
from router.http.chat_parser import ChatParser, Delta
from router.http.tool_formats import ToolFormat, demanded, prompt_opens_thought, tool_format_of
from tests.pagewire.test_grammar import draw
from tests.tiny_tokenizers import EOS, byte_level

CALL = '{"name": "add", "arguments": {"a": "x}\\"{", "b": [1, {"c": 2}]}}'
ARGUMENTS = '{"a": "x}\\"{", "b": [1, {"c": 2}]}'


def parse(style: ToolFormat | None, pieces: list[str], *, reasoning: bool = True) -> tuple[str, str, list[list[str]]]:
    """(reasoning, content, [name, arguments] of each call)."""
    parser, calls, thoughts, content = ChatParser(style, reasoning=reasoning), [], "", ""

    def take(delta: Delta) -> None:
        nonlocal thoughts, content
        thoughts += delta.reasoning
        content += delta.content
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(calls)
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments

    for piece in pieces:
        take(parser.push(piece))
    take(parser.finish())
    assert parser.num_calls == len(calls)
    return thoughts, content, calls


CASES: list[tuple[ToolFormat | None, str, tuple[str, str, list[list[str]]]]] = [
    (None, "just text < think", ("", "just text < think", [])),
    (None, "<think>\nhm, so\n</think>\n\nyes", ("hm, so\n", "yes", [])),
    (None, "<think>never ends", ("never ends", "", [])),
    (None, "a <think> later is text", ("", "a <think> later is text", [])),
    (None, f"<tool_call>{CALL}</tool_call>", ("", f"<tool_call>{CALL}</tool_call>", [])),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", ("", "", [["add", ARGUMENTS]])),
    (
        "hermes",
        f"<think>x</think>First. <tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>",
        ("x", "First. ", [["add", ARGUMENTS], ["add", ARGUMENTS]]),
    ),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>\n end', ("", "end", [["f", '{"a": 1}']])),
    ("hermes", "<tool_call>no json</tool_call>!", ("", "<tool_call>no json</tool_call>!", [])),
    ("hermes", "if a <tool b", ("", "if a <tool b", [])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', ("", "", [["f", '{"a": 1']])),
    ("hermes", '<tool_call>{"name": "f"', ("", '<tool_call>{"name": "f"', [])),
    ("llama3", '{"name": "f", "parameters": {"a": {}}}', ("", "", [["f", '{"a": {}}']])),
    (
        "llama3",
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"q": 1}}',
        ("", "", [["f", "{}"], ["g", '{"q": 1}']]),
    ),
    ("llama3", "Just an answer {1}", ("", "Just an answer {1}", [])),
    ("llama3", '{"answer": 42}', ("", '{"answer": 42}', [])),
    (
        "mistral",
        'Well.[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        ("", "Well.", [["f", '{"a": 1}'], ["g", "{}"]]),
    ),
    ("mistral", "[TOOL_CALLS][broken", ("", "[TOOL_CALLS][broken", [])),
]


@pytest.mark.parametrize(("style", "text", "wanted"), CASES)
def test_however_it_is_cut(style: ToolFormat | None, text: str, wanted: tuple[str, str, list[list[str]]]) -> None:
    assert parse(style, [text]) == wanted
    assert parse(style, list(text)) == wanted
    for seed in range(20):
        rng, pieces, rest = random.Random(seed), [], text
        while rest:
            length = rng.randint(1, 9)
            pieces.append(rest[:length])
            rest = rest[length:]
        assert parse(style, pieces) == wanted, pieces


def test_arguments_stream() -> None:
    parser = ChatParser("hermes", reasoning=False)
    assert [call.name for call in parser.push('<tool_call>{"name": "f", "arguments": {').calls] == ["f", None]
    assert parser.push('"a": ').calls[0].arguments == '"a": '


def test_thoughts_stay_where_they_are_not_wanted() -> None:
    assert parse(None, ["<think>a</think>b"], reasoning=False) == ("", "<think>a</think>b", [])


def test_a_thought_that_the_prompt_has_opened() -> None:
    parser = ChatParser("hermes", reasoning=True, in_thought=True)
    deltas = [*map(parser.push, ("\nhm", " so</th", "ink>\n\nyes")), parser.finish()]
    assert "".join(delta.reasoning for delta in deltas) == "hm so"
    assert "".join(delta.content for delta in deltas) == "yes"


@pytest.mark.parametrize(("ending", "opens"), [("<think>\\n", True), ("<think>\\n\\n</think>", False), ("", False)])
def test_templates_that_open_a_thought(ending: str, opens: bool) -> None:
    source = "{{ messages[0].content }}{% if add_generation_prompt %}{{ '<a>" + ending + "' }}{% endif %}"
    tokenizer = Tokenizer(byte_level(), chat_template=ChatTemplate(source, {}))
    assert prompt_opens_thought(tokenizer) == opens


@pytest.mark.parametrize(
    ("source", "style"),
    [
        ("{{ tools }}<tool_call>", "hermes"),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ("{{ tools }}<|python_tag|>", "llama3"),
        ("{{ messages }}", None),
    ],
)
def test_formats_by_template(source: str, style: ToolFormat | None) -> None:
    assert tool_format_of(Tokenizer(byte_level(), chat_template=ChatTemplate(source, {}))) == style


@pytest.mark.parametrize("style", ["hermes", "llama3", "mistral"])
@pytest.mark.parametrize("only", [None, "g"])
def test_what_is_demanded_can_be_parsed(style: ToolFormat, only: str | None) -> None:
    """Random texts of the grammar are calls, and nothing but calls."""
    parameters = {
        "type": "object",
        "properties": {"a": {"enum": ["x", 1]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("f", "g")]
    tokenizer = Tokenizer(byte_level())
    structure = demanded(style, tools, only=only, parallel=True)
    grammar = GrammarCompiler(lambda: tokenizer, tokenizer.num_tokens, (EOS,)).compile(structure)
    for seed in range(5):
        _, text = draw(grammar, tokenizer, seed, most=3000)
        reasoning, content, calls = parse(style, list(text))
        assert (reasoning, content.strip()) == ("", "")
        assert calls
        for name, arguments in calls:
            assert name in (("f", "g") if only is None else (only,))
            assert json.loads(arguments)["a"] in ("x", 1)
