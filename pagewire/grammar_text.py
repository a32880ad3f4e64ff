"""Structured output as llguidance's grammar text, and whether it is one: all that a router asks of it. No numpy."""

import json

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from pagewire.sampling import StructuredOutput

# Work is bounded, not the size alone: a short text can mean a huge automaton. Measured with these limits, on one core
# of a Xeon: texts of 64 KiB compile in at most 0.4 s, a step of those that are accepted takes at most 60 ms.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=10_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
_MAX_MESSAGE = 300


class GrammarError(ValueError):
    """The text is no grammar, or one that is too large, or that nothing satisfies."""


def check_structure(structure: StructuredOutput) -> None:
    """Raises GrammarError for what no vocabulary could make a grammar; slow, like compiling."""
    message = LLMatcher.validate_grammar(grammar_text(structure), limits=LIMITS)
    if message and not message.startswith("WARNING"):
        raise GrammarError(shorten(message))


def grammar_text(structure: StructuredOutput) -> str:
    """In llguidance's own form. Raises GrammarError for what cannot be brought into it."""
    try:
        if structure.kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(structure.value)
        if structure.kind == "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}')
        if structure.kind == "regex":
            return LLMatcher.grammar_from_regex(structure.value)
        if structure.kind == "choice":
            # Lark's strings have JSON's escapes.
            return LLMatcher.grammar_from_lark(
                "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in structure.choices)
            )
        return LLMatcher.grammar_from_lark(any_to_lark(structure.value))
    except Exception as error:  # the converters raise whatever their parser does
        raise GrammarError(shorten(str(error) or type(error).__name__)) from None


def shorten(message: str) -> str:
    """One line of at most 300 characters."""
    line = " ".join(message.split())
    return line if len(line) <= _MAX_MESSAGE else line[:_MAX_MESSAGE] + " …"
