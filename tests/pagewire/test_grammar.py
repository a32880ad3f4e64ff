"""Grammars: what they allow, that a state is a function of the output, and that hostile ones are refused."""

import json
import re

import numpy as np
import pytest

from pagewire.grammar import Grammar, GrammarCompiler, GrammarError, GrammarState, check_structure
from pagewire.sampling import StructuredOutput
from pagewire.text.tokenizer import Tokenizer
from tests.tiny_tokenizers import EOS, byte_fallback, byte_level


@pytest.fixture(scope="module", params=[byte_level, byte_fallback])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(request.param())


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer, tokenizer.num_tokens + 7, (EOS, 1))


def draw(grammar: Grammar, tokenizer: Tokenizer, seed: int, most: int = 300) -> tuple[list[int], str]:
    """A random output until its end."""
    rng, state, token_ids = np.random.default_rng(seed), grammar.start(), list[int]()
    while not token_ids or token_ids[-1] not in (EOS, 1):
        assert len(token_ids) < most, "it does not end"
        allowed = np.flatnonzero(state.allowed(token_ids))
        token_ids.append(int(rng.choice(allowed)))
    detokenizer = tokenizer.detokenizer()
    return token_ids, "".join(map(detokenizer.push, token_ids[:-1])) + detokenizer.flush()


@pytest.mark.parametrize(
    ("structure", "pattern"),
    [
        (StructuredOutput("regex", "[a-f]{2,5}(ing)?!"), "[a-f]{2,5}(ing)?!"),
        (StructuredOutput("choice", choices=("the", 'thing "x"\n', "你好")), '(the|thing "x"\\n|你好)'),
        (StructuredOutput("grammar", 'start: "a" [start] "b"'), "a+b+"),
        (StructuredOutput("grammar", 'root ::= [0-9]{1,3} ("," [0-9])*'), "[0-9]{1,3}(,[0-9])*"),
    ],
)
def test_every_output_has_the_form(
    compiler: GrammarCompiler, tokenizer: Tokenizer, structure: StructuredOutput, pattern: str
) -> None:
    check_structure(structure)
    texts = {draw(compiler.compile(structure), tokenizer, seed)[1] for seed in range(30)}
    assert len(texts) > 2
    for text in texts:
        assert re.fullmatch(pattern, text), text


def test_json_schema(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, "the", None]}, "b": {"type": "boolean"}},
              "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
    grammar = compiler.compile(StructuredOutput("json_schema", json.dumps(schema)))
    for seed in range(20):
        value = json.loads(draw(grammar, tokenizer, seed)[1])
        assert list(value) == ["a", "b"]
        assert value["a"] in (1, "the", None)
        assert isinstance(value["b"], bool)


def test_a_state_is_a_function_of_the_output(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(StructuredOutput("regex", "([a-c]{1,3}-)*(the|thing)"))
    token_ids, _ = draw(grammar, tokenizer, 4)
    along = grammar.start()
    for end in range(len(token_ids)):
        mask = along.allowed(token_ids[:end])
        assert (mask == along.allowed(token_ids[:end])).all()
        assert (mask == grammar.start().allowed(token_ids[:end])).all()
        assert mask[token_ids[end]]
    with pytest.raises(GrammarError, match=r"left its grammar at token \d"):
        grammar.start().allowed([token_ids[0], *[token_ids[0]] * 9])


def test_ends_and_padding(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state: GrammarState = compiler.compile(StructuredOutput("regex", "a?")).start()
    (a,) = tokenizer.encode("a", add_special_tokens=False)[-1:]
    first = np.flatnonzero(state.allowed([])).tolist()
    assert {EOS, 1, a} <= set(first)
    assert max(first) < tokenizer.num_tokens, "an id without a token"
    assert np.flatnonzero(state.allowed([a])).tolist() == [1, EOS]


HOSTILE = [
    StructuredOutput("regex", "(a"),
    StructuredOutput("regex", "(?=a)b"),
    StructuredOutput("json_schema", "{"),
    StructuredOutput("json_schema", '{"type": "nothing"}'),
    StructuredOutput("json_schema", '{"$ref": "https://example.org/schema"}'),
    StructuredOutput("json_schema", '{"uniqueItems": true, "type": "array"}'),
    StructuredOutput("json_schema", "[" * 5000),
    StructuredOutput("json_schema", '{"items":' * 3000 + "{}" + "}" * 3000),
    StructuredOutput("json_schema", "false"),
    StructuredOutput("grammar", "start: missing"),
    StructuredOutput("grammar", "root ::= " + "(" * 8000 + '"a"' + ")" * 8000),
    StructuredOutput("grammar", "start: start"),
    StructuredOutput("grammar", "start: " + '("a"?) ' * 8000),
]


@pytest.mark.parametrize("structure", HOSTILE, ids=range(len(HOSTILE)))
def test_what_does_not_compile_is_refused_in_few_words(compiler: GrammarCompiler, structure: StructuredOutput) -> None:
    with pytest.raises(GrammarError) as refused:
        compiler.compile(structure)
    assert 0 < len(str(refused.value)) < 400


def test_kept_by_content(compiler: GrammarCompiler) -> None:
    one = compiler.compile(StructuredOutput("regex", "a{7}"))
    assert compiler.compile(StructuredOutput("regex", "a{7}")) is one
    assert compiler.compile(StructuredOutput("regex", "a{8}")) is not one


def test_a_model_without_end() -> None:
    compiler = GrammarCompiler(lambda: Tokenizer(byte_level()), 300, ())
    with pytest.raises(GrammarError, match="no end-of-sequence token"):
        compiler.compile(StructuredOutput("regex", "a"))
