"""`pagewire generate`: one prompt, streamed as text or printed as one JSON object."""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagewire.cli import connection as c
from pagewire.cli import sampling_flags as s

if TYPE_CHECKING:
    from pagewire.completion import Choice, Completion


def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue; - reads it from stdin.")],
    chat: Annotated[bool, typer.Option("--chat", help="Treat the prompt as a user's message.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
    n: Annotated[
        int | None,
        typer.Option("--n", metavar="N", help="Choices to draw.", show_default="1", rich_help_panel="Sampling"),
    ] = None,
    max_tokens: s.MaxTokens = None,
    temperature: s.Temperature = None,
    top_p: s.TopP = None,
    top_k: s.TopK = None,
    min_p: s.MinP = None,
    seed: s.Seed = None,
    stop: s.Stop = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs",
            metavar="N",
            help="With --json: log-probabilities of each token and of the N likeliest.",
            show_default="none",
            rich_help_panel="Sampling",
        ),
    ] = None,
    target: c.Target = c.DEFAULT_TARGET,
    model: c.Model = "",
    timeout: c.Timeout = None,
    tls_ca: c.TlsCa = None,
    tls_cert: c.TlsCert = None,
    tls_key: c.TlsKey = None,
    auth_token_file: c.TokenFile = None,
) -> int:
    """Generate text for one prompt."""
    text = sys.stdin.read() if prompt == "-" else prompt
    options: dict[str, Any] = {
        "model": model,
        "stop": stop or (),
        "timeout": timeout,
        **s.given(
            n=n,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            logprobs=logprobs,
        ),
    }
    asked = {"chat": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    with c.connect(target, c.load_security(tls_ca, tls_cert, tls_key, auth_token_file)) as client:
        if as_json:
            print(json.dumps(_as_dict(client.complete(**asked, **options)), ensure_ascii=False))
        elif n is not None and n > 1:
            for number, choice in enumerate(client.complete(**asked, **options).choices):
                print(f"[{number}] {choice.text}")
        else:
            for chunk in client.generate(**asked, **options):
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
            sys.stdout.write("\n")
    return 0


def _as_dict(completion: "Completion") -> dict[str, Any]:
    result = {
        **_choice(completion.choices[0]),
        "usage": asdict(completion.usage),
        "timing": asdict(completion.timing),
        "prefill_worker": completion.prefill_worker,
        "decode_worker": completion.decode_worker,
        "request_id": completion.request_id,
        "seed": completion.seed,
    }
    if len(completion.choices) > 1:
        result["choices"] = [_choice(choice) for choice in completion.choices]
    return result


def _choice(choice: "Choice") -> dict[str, Any]:
    described: dict[str, Any] = {
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if choice.logprobs:
        described["logprobs"] = [asdict(entry) for entry in choice.logprobs]
    return described
