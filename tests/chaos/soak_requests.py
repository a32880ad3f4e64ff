"""What the soak asks for: a catalogue of requests whose whole answers an undisturbed engine gave before the load."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagewire.sampling import SamplingParams
from pagewire.text.tokenizer import Tokenizer
from tests.chaos.oracle import Stream
from tests.decode_svc.harness import make_engine

MAX_MODEL_LEN = 400
KINDS = ("whole", "whole", "whole", "slow", "stop", "cancel", "deadline")


@dataclass(frozen=True, slots=True)
class Known:
    """A request and its whole answer: tokens and text of each choice."""

    prompt: list[int]
    options: dict[str, Any]
    outputs: list[list[int]]
    texts: list[str]

    def fault(self, got: Stream, stop: str = "") -> str:
        """What is wrong with a finished stream; empty if nothing is."""
        for choice, (tokens, text) in enumerate(zip(self.outputs, self.texts, strict=True)):
            cut = text.find(stop) if stop else -1
            wanted_text = text if cut < 0 else text[:cut]
            # A stop string ends a choice early: its tokens are a beginning of the oracle's.
            wanted = tokens if cut < 0 else tokens[: len(got.outputs[choice])]
            if got.outputs[choice] != wanted or got.text[choice] != wanted_text:
                return (
                    f"choice {choice} of {self.prompt} {self.options} stop={stop!r}: "
                    f"{got.outputs[choice]} {got.text[choice]!r} instead of {wanted} {wanted_text!r}"
                )
        return ""


@dataclass(frozen=True, slots=True)
class Draw:
    """One request to make. `pause` seconds after each chunk, `timeout` and `cancel_after` in seconds."""

    known: Known
    kind: str
    stop: str = ""
    timeout: float = 120.0
    pause: float = 0.0
    cancel_after: float | None = None
    more: dict[str, Any] = field(default_factory=dict)


def make_catalogue(model: Path, rng: random.Random, size: int) -> list[Known]:
    """Prompts that share prefixes, long outputs, every kind of sampling. Takes seconds: it runs the model."""
    bases = [[rng.randrange(10, 250) for _ in range(200)] for _ in range(6)]
    prompts, options = [], list[dict[str, Any]]()
    for _ in range(size):
        prompts.append(rng.choice(bases)[: rng.choice([rng.randrange(1, 30), rng.randrange(30, 201)])])
        options.append(_options(rng))
    outputs = _run(model, prompts, options)
    tokenizer = Tokenizer.load(model)
    return [
        Known(prompt, option, output, [tokenizer.decode(choice) for choice in output])
        for prompt, option, output in zip(prompts, options, outputs, strict=True)
    ]


def _options(rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_tokens": rng.choice([1, 2, 60, 100, 150, 190, 190]),
        "ignore_eos": rng.random() < 0.8,
        "seed": rng.randrange(1 << 32),
        "temperature": rng.choice([0.0, 0.0, 0.8, 1.3]),
        "n": rng.choice([1, 1, 1, 1, 2, 3]),
    }
    if rng.random() < 0.3:
        options |= {"repetition_penalty": 1.2, "presence_penalty": 0.4}
    if rng.random() < 0.2:
        options["min_tokens"] = min(options["max_tokens"], 50)
    return options


def _run(model: Path, prompts: Sequence[list[int]], options: Sequence[dict[str, Any]]) -> list[list[list[int]]]:
    engine = make_engine(model, num_blocks=2048, max_num_batched_tokens=512, max_num_seqs=64)
    try:
        return engine.generate(prompts, [SamplingParams(**each) for each in options])
    finally:
        engine.close()


def draw(rng: random.Random, catalogue: Sequence[Known]) -> Draw:
    """Any request of the catalogue, and what the client will do to it."""
    known, kind = rng.choice(catalogue), rng.choice(KINDS)
    if kind == "slow":
        return Draw(known, kind, pause=rng.uniform(0.005, 0.05))
    if kind == "cancel":
        return Draw(known, kind, cancel_after=rng.uniform(0, 2))
    if kind == "deadline":
        return Draw(known, kind, timeout=rng.uniform(0.02, 2))
    if kind == "stop" and "min_tokens" not in known.options:
        text = known.texts[0]
        # Text with U+FFFD is cut differently when only a part of a character is there.
        stop = text[len(text) * 2 // 3 :][: rng.randrange(1, 6)]
        if stop and "\ufffd" not in stop:
            return Draw(known, kind, stop=stop)
    return Draw(known, "logprobs", more={"logprobs": 2}) if rng.random() < 0.2 else Draw(known, "whole")
