"""`pagewire chat`: a conversation, typed at a terminal or piped in with one turn per line."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagewire.cli import connection as c
from pagewire.cli import sampling_flags as s

if TYPE_CHECKING:
    from pagewire.client import Client

_HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


def chat(
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System message.", show_default="none")
    ] = None,
    max_tokens: s.MaxTokens = None,
    temperature: s.Temperature = None,
    top_p: s.TopP = None,
    top_k: s.TopK = None,
    min_p: s.MinP = None,
    seed: s.Seed = None,
    stop: s.Stop = None,
    target: c.Target = c.DEFAULT_TARGET,
    model: c.Model = "",
    timeout: c.Timeout = None,
    tls_ca: c.TlsCa = None,
    tls_cert: c.TlsCert = None,
    tls_key: c.TlsKey = None,
    auth_token_file: c.TokenFile = None,
) -> int:
    """Talk to the model over several turns."""
    options: dict[str, Any] = {
        "model": model,
        "stop": stop or (),
        "timeout": timeout,
        **s.given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed),
    }
    opening = [{"role": "system", "content": system}] if system else []
    with c.connect(target, c.load_security(tls_ca, tls_cert, tls_key, auth_token_file)) as client:
        if sys.stdin.isatty():
            _converse(client, opening, options)
        else:
            messages = list(opening)
            for line in sys.stdin:
                if text := line.strip():
                    messages.append({"role": "user", "content": text})
                    messages.append({"role": "assistant", "content": _answer(client, messages, options)})
    return 0


def _converse(client: "Client", opening: list[dict[str, str]], options: dict[str, Any]) -> None:
    """An error ends the turn, not the conversation."""
    from pagewire.errors import PagewireError

    print(_HELP, file=sys.stderr)
    messages = list(opening)
    for text in _typed():
        if text == "/reset":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": text})
        try:
            messages.append({"role": "assistant", "content": _answer(client, messages, options)})
        except PagewireError as error:
            messages.pop()
            print(f"error: {error.code.name}: {error.message}", file=sys.stderr)
        except KeyboardInterrupt:
            # The cut answer is forgotten together with its question.
            messages.pop()
            print()


def _typed() -> Iterator[str]:
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return
        if text == "/exit":
            return
        if text:
            yield text


def _answer(client: "Client", messages: list[dict[str, str]], options: dict[str, Any]) -> str:
    pieces = []
    for chunk in client.generate(chat=messages, **options):
        pieces.append(chunk.text)
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return "".join(pieces)
