"""Decode tokens a second with and without speculation, one sequence, in interleaved pairs.

    .venv/bin/python bench/speculation.py --model .cache/models/gemma-3-270m --out FILE

Methods: prompt lookup; a copy of the model with int8 weights as its draft; a copy that lacks every other layer (and has
int8 weights). Texts: one that repeats itself, code, prose that does not; numbers in sentences, whose words are followed
by others each time; an output that a JSON schema binds.

`ratio` is the median over pairs of the same text. `cost` is the time of a token of the draft model alone, relative to
the model's; `allowed` is what acceptance and cost allow by the standard formula, tokens a step / (1 + drafts a step *
cost), for which a step that checks drafts takes no longer than another. `check` is what a draft's row in a step takes
by the clock (steps of prompt lookup with all drafts against plain ones), and `allowed_checked` the formula with cost +
check. `kept` is the median over pairs of ratio / allowed. Acceptance and tokens a step are those of all pairs.
"""

import argparse
import csv
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from bench.machine import describe
from engine.engine import Engine
from engine.request import EngineRequest
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams, StructuredOutput

Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
METHODS = ("ngram", "int8", "w8a8", "layers")
TEXTS = {
    "repeats": "The cat sat on the mat. The dog sat on the mat. The bird sat on the mat. " * 4,
    "code": "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n    return",
    "prose": "The history of the city of Rome begins with",
    "noise": " ".join(f"{i * 7919 % 97} is to {i * 104729 % 89} as" for i in range(40)),
    "json": "A list of three people with first name, family name and age, as JSON:",
}
_PERSON = {name: {"type": "string", "maxLength": 20} for name in ("first_name", "family_name")}
_PERSON |= {"age_in_years": {"type": "integer", "minimum": 1, "maximum": 99}}
_SCHEMA = {"type": "array", "minItems": 3, "maxItems": 5,
           "items": {"type": "object", "properties": _PERSON, "required": list(_PERSON),
                     "additionalProperties": False}}  # fmt: skip
STRUCTURES = {"json": StructuredOutput("json_schema", json.dumps(_SCHEMA))}
"""Of these texts' outputs."""


@dataclass(frozen=True, slots=True)
class Point:
    method: str
    text: str
    tokens: int
    clock: str
    threads: int
    plain_tokens_per_second: float
    speculative_tokens_per_second: float
    ratio: float
    acceptance: float
    tokens_per_step: float
    cost: float
    allowed: float
    check: float
    allowed_checked: float
    kept: float
    hardware: str
    cpus: str
    load: str
    numerics_class: str


@dataclass(frozen=True, slots=True)
class Run:
    """The tokens of a request and, of each step after its first token, (seconds, drafted, accepted)."""

    tokens: list[int]
    steps: list[tuple[float, int, int]]

    @property
    def rate(self) -> float:
        """Decode tokens a second after the first one."""
        return (len(self.tokens) - 1) / sum(seconds for seconds, _, _ in self.steps)

    @property
    def num_drafted(self) -> int:
        return sum(drafted for _, drafted, _ in self.steps)

    @property
    def num_accepted(self) -> int:
        return sum(accepted for _, _, accepted in self.steps)


def allowed(runs: list[Run], cost: float) -> float:
    """What acceptance and a draft's cost allow."""
    num_steps = sum(len(each.steps) for each in runs)
    num_tokens = sum(len(each.tokens) - 1 for each in runs)
    return num_tokens / (num_steps + cost * sum(each.num_drafted for each in runs))


def run(
    engine: Engine, prompt: list[int], num_tokens: int, clock: Clock, structure: StructuredOutput | None = None
) -> Run:
    params = SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=structure is None, seed=1, structured_output=structure
    )
    engine.add(EngineRequest("r", tuple(prompt), params))
    tokens: list[int] = []
    steps: list[tuple[float, int, int]] = []
    ended = clock()
    while engine.has_work:
        output, began = engine.step(), ended
        ended = clock()
        if tokens:
            drafted, accepted = output.drafts[0] if output.drafts else (0, 0)  # there is one sequence
            steps.append((ended - began, drafted, accepted))
        tokens += [token.token_id for token in output.tokens]
    engine.kv_cache.take_events()
    return Run(tokens, steps)


def check_of(base: EngineOptions, plain: Engine, prompt: list[int], num_drafts: int, clock: Clock, pairs: int) -> float:
    """What a draft's row takes in a step, in plain steps: prompt lookup's drafts cost nothing else."""
    lookup = {"method": "ngram", "num_speculative_tokens": num_drafts, "least_acceptance": 0, "prompt_lookup_min": 1}
    found = []
    with running(base, speculative_config=json.dumps(lookup)) as checking:
        for _ in range(pairs):
            usual = statistics.median(seconds for seconds, _, _ in run(plain, prompt, 64, clock).steps)
            steps = run(checking, prompt, 64, clock).steps
            full = statistics.median(seconds for seconds, drafted, _ in steps if drafted == num_drafts)
            found.append((full / usual - 1) / num_drafts)
    return statistics.median(found)


def skip_layers(model: Path, out: Path) -> Path:
    """A copy without every other layer but the first and the last ones; those of full attention stay."""
    config = json.loads((model / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    kinds = config.get("layer_types") or ["full_attention"] * num_layers
    uniform = len(set(kinds)) == 1
    kept = [
        layer
        for layer, kind in enumerate(kinds)
        if layer % 2 == 0 or layer == num_layers - 1 or (kind == "full_attention" and not uniform)
    ]
    weights = {}
    for file in sorted(model.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            before, found, after = name.partition("layers.")
            number, _, rest = after.partition(".")
            if not found:
                weights[name] = tensor
            elif int(number) in kept:
                weights[f"{before}layers.{kept.index(int(number))}.{rest}"] = tensor
    out.mkdir(parents=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    changed = {"num_hidden_layers": len(kept)}
    if "layer_types" in config:
        changed["layer_types"] = [kinds[layer] for layer in kept]
    (out / "config.json").write_text(json.dumps(config | changed))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (model / name).is_file():
            (out / name).write_bytes((model / name).read_bytes())
    return out


@contextmanager
def running(options: EngineOptions, **changes: str) -> Iterator[Engine]:
    engine = Engine(options.model_copy(update=changes))
    try:
        yield engine
    finally:
        engine.close()


def config_of(method: str, model: Path, scratch: Path, num_drafts: int) -> dict[str, object]:
    """vLLM's keys."""
    config: dict[str, object] = {"num_speculative_tokens": num_drafts}
    if method == "ngram":
        return config | {"method": "ngram"}
    draft = skip_layers(model, scratch / "layers") if method == "layers" else model
    return config | {"model": str(draft), "quantization": "w8a8" if method == "layers" else method}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--texts", nargs="+", choices=list(TEXTS), default=list(TEXTS))
    parser.add_argument("--drafts", type=int, default=4, help="num_speculative_tokens")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--clock", choices=list(CLOCKS), default="wall", help="cpu: on a busy machine, with --threads 1"
    )
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a CSV, to which a row is added for each point")
    options = parser.parse_args()
    base = EngineOptions(
        model=str(options.model),
        dtype="bfloat16",
        kv_cache_memory_bytes=128 << 20,  # two models' of a prompt and 256 tokens
        max_model_len=1024,
        cpu_threads=options.threads,
    )
    clock = CLOCKS[options.clock]
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    prompts = {name: tokenizer.encode(text).ids for name, text in TEXTS.items() if name in options.texts}
    usual = tokenizer.encode(TEXTS["prose"]).ids
    repeated = tokenizer.encode(TEXTS["repeats"]).ids
    with TemporaryDirectory(prefix="speculation-") as scratch, running(base) as plain:
        check = check_of(base, plain, repeated, options.drafts, clock, options.pairs)
        for method in options.methods:
            config = config_of(method, options.model, Path(scratch), options.drafts)
            cost = 0.0
            if "model" in config:
                draft = {"model": str(config["model"]), "quantization": str(config["quantization"])}
                with running(base, **draft) as alone:
                    rates = [
                        (run(plain, usual, 32, clock).rate, run(alone, usual, 32, clock).rate)
                        for _ in range(options.pairs)
                    ]
                    cost = statistics.median(slow / fast for slow, fast in rates)
            with running(base, speculative_config=json.dumps(config)) as speculative:
                for name, prompt in prompts.items():
                    point = measure(method, name, prompt, plain, speculative, (cost, check), options)
                    if options.out:
                        append(point, options.out)


def append(point: Point, path: Path) -> None:
    """As a row of the CSV; what was measured before stays, also in another run."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow([field.name for field in fields(Point)])
        writer.writerow(astuple(point))


def measure(
    method: str,
    name: str,
    prompt: list[int],
    plain: Engine,
    speculative: Engine,
    costs: tuple[float, float],
    options: argparse.Namespace,
) -> Point:
    """`costs` are a draft's and its row's."""
    cost, check = costs
    pairs: list[tuple[Run, Run]] = []
    clock = CLOCKS[options.clock]
    for _ in range(options.pairs):
        slow = run(plain, prompt, options.tokens, clock, STRUCTURES.get(name))
        fast = run(speculative, prompt, options.tokens, clock, STRUCTURES.get(name))
        if fast.tokens != slow.tokens:
            sys.exit(f"{method}, {name}: speculation changed a token")
        pairs.append((slow, fast))
    runs = [fast for _, fast in pairs]
    machine = describe()
    point = Point(
        method,
        name,
        len(runs[0].tokens),
        options.clock,
        options.threads,
        statistics.median(slow.rate for slow, _ in pairs),
        statistics.median(fast.rate for _, fast in pairs),
        statistics.median(fast.rate / slow.rate for slow, fast in pairs),
        sum(each.num_accepted for each in runs) / max(1, sum(each.num_drafted for each in runs)),
        allowed(runs, 0.0),
        cost,
        allowed(runs, cost),
        check,
        allowed(runs, cost + check),
        statistics.median(fast.rate / slow.rate / allowed([fast], cost) for slow, fast in pairs),
        machine["hardware"],
        machine["cpus"],
        machine["load"],
        plain.numerics_class,
    )
    print(
        f"{method:6s} {name:8s} {point.plain_tokens_per_second:6.1f} -> {point.speculative_tokens_per_second:6.1f} "
        f"tokens/s, ratio {point.ratio:4.2f} of {point.allowed:4.2f} ({point.allowed_checked:4.2f} checked): "
        f"{point.kept:4.2f} kept, cost {point.cost:4.2f} and {point.check:.3f}, "
        f"{point.acceptance:4.0%} accepted, {point.tokens_per_step:.2f} tokens a step",
        flush=True,
    )
    return point


if __name__ == "__main__":
    main()
