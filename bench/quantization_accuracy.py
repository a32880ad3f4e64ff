"""Perplexity and top-1 agreement of int8 weights, and of KV in one byte a value, on the language reference's prose.

The text comes with Python.

    .venv/bin/python bench/quantization_accuracy.py --model .cache/models/gemma-3-270m --out FILE

The text is cut into windows that each start a sequence. Every token but a window's first is predicted; `agreement` is
how often the likeliest token is float32's, `divergence` the mean of |log p - float32's log p| of the text's own tokens.
"""

import argparse
import csv
import math
import pydoc_data.topics
import statistics
import sys
import time
from dataclasses import astuple, dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.machine import processor
from engine.engine import Engine
from engine.request import EngineRequest
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams
from pagewire.text.tokenizer import Tokenizer

BASELINE = "float32"
VARIANTS = (
    "float32",
    "bfloat16",
    "float32+int8",
    "float32+w8a8",
    "bfloat16+int8",
    "bfloat16+w8a8",
    "float32+kv_int8",
    "float32+kv_fp8",
    "bfloat16+kv_int8",
    "bfloat16+kv_fp8",
)
TOPICS = (
    "classes",
    "function",
    "exceptions",
    "naming",
    "objects",
    "import",
    "with",
    "lambda",
    "typesseq",
    "context-managers",
)


@dataclass(frozen=True, slots=True)
class Point:
    hardware: str
    text: str
    num_tokens: int
    variant: str
    numerics_class: str
    perplexity: float
    perplexity_ratio: float
    agreement: float
    divergence: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one token of the text: its log-probability, and the likeliest token."""

    logprob: float
    likeliest: int


def text() -> str:
    """The topics, without the reference's markup of headings."""
    topics: dict[str, str] = pydoc_data.topics.topics
    lines = "\n".join(topics[name] for name in TOPICS if name in topics).splitlines()
    return "\n".join(line for line in lines if not line or set(line) - set("*=-~ "))


def predict(engine: Engine, windows: list[list[int]]) -> list[Prediction]:
    """Of every token but each window's first."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, seed=1)
    found = []
    for window in windows:
        engine.add(EngineRequest("r", tuple(window), params))
        while engine.has_work:
            for part in engine.step().prompt_logprobs:
                found += [Prediction(entry.logprob, entry.top[0][0]) for entry in part.entries]
        engine.kv_cache.take_events()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window-tokens", type=int, default=512)
    parser.add_argument("--variants", nargs="+", default=VARIANTS, help=f"{BASELINE} is always among them")
    parser.add_argument("--out", type=Path, help="write a CSV")
    options = parser.parse_args()
    token_ids = Tokenizer.load(Path(options.model)).encode(text(), add_special_tokens=False)
    size = options.window_tokens - 1
    bos = Tokenizer.load(Path(options.model)).encode("", add_special_tokens=True)[:1]
    windows = [bos + token_ids[i * size : (i + 1) * size] for i in range(options.windows)]
    if len(windows[-1]) < options.window_tokens:
        sys.exit(f"the text has {len(token_ids)} tokens, fewer than {options.windows} windows of {size}")
    label = f"pydoc_data.topics of Python {sys.version.split()[0]}, {options.windows} x {options.window_tokens}"
    print(f"{processor()}, {label}")
    baseline: list[Prediction] = []
    made: list[Point] = []
    for variant in dict.fromkeys([BASELINE, *options.variants]):
        dtype, _, quantization = variant.partition("+")
        began = time.perf_counter()
        of_weights, _, of_kv = quantization.partition("kv_")
        fields_ = {"model": options.model, "dtype": dtype, "quantization": of_weights or "none"}
        fields_["kv_cache_dtype"] = of_kv or "auto"
        limits = {"max_model_len": 1024, "kv_cache_memory_bytes": 128 << 20, "enable_prefix_caching": False}
        engine = Engine(EngineOptions.model_validate(fields_ | limits))
        found = predict(engine, windows)
        baseline = baseline or found
        perplexity = math.exp(-statistics.fmean(each.logprob for each in found))
        pairs = list(zip(found, baseline, strict=True))
        made.append(
            Point(
                processor(), label, len(found), variant, engine.numerics_class, perplexity,
                perplexity / (made[0].perplexity if made else perplexity),
                statistics.fmean(mine.likeliest == theirs.likeliest for mine, theirs in pairs),
                statistics.fmean(abs(mine.logprob - theirs.logprob) for mine, theirs in pairs),
            )
        )  # fmt: skip
        engine.close()
        p = made[-1]
        print(
            f"{variant:<15} perplexity {p.perplexity:8.4f} ({p.perplexity_ratio:.4f}x), top-1 {p.agreement:7.2%}, "
            f"|dlogp| {p.divergence:.4f}, {time.perf_counter() - began:.0f} s",
            flush=True,
        )
    if options.out:
        with options.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([field.name for field in fields(Point)])
            writer.writerows(astuple(point) for point in made)


if __name__ == "__main__":
    main()
