"""Perplexity and top-1 agreement of quantized weights, and of KV in one byte a value, on the language reference.

The text comes with Python.

    .venv/bin/python bench/quantization_accuracy.py --model .cache/models/gemma-3-270m --out FILE

The text is cut into windows that each start a sequence. Every token but a window's first is predicted; `agreement` is
how often the likeliest token is the baseline's, `divergence` the mean of |log p - the baseline's log p| of the text's
own tokens. Variants are as in quantization.py, or "+kv_int8", "+kv_fp8".

The baseline is float32. A variant of a format or of a GGUF file comes with one of the same weights in float32, a file's
expanded: what the format costs is that one's ratio, and what the kernels cost is `kernel_ratio`, the two's.
"""

import argparse
import csv
import math
import pydoc_data.topics
import statistics
import sys
import tempfile
from dataclasses import astuple, dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.machine import processor
from bench.quantized_copies import FORMATS, quantized_copy
from engine.engine import Engine
from engine.gguf import convert_gguf, packed_directory
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
    "bfloat16+gptq4",
    "bfloat16+gptq8",
    "bfloat16+awq4",
    "bfloat16+w4a16",
    "bfloat16+w8a16",
    "bfloat16+fp8",
    "bfloat16+fp8_blocks",
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
    kernel_ratio: float


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


def engine_options(model: Path, dtype: str, quantization: str, kernels: str) -> EngineOptions:
    of_weights, _, of_kv = quantization.partition("kv_")
    fields_ = {"model": str(model), "dtype": dtype, "quantization": of_weights or "none", "kernels": kernels}
    limits = {"max_model_len": 1024, "kv_cache_memory_bytes": 128 << 20, "enable_prefix_caching": False}
    return EngineOptions.model_validate(fields_ | limits | {"kv_cache_dtype": of_kv or "auto"})


def run(options: EngineOptions, windows: list[list[int]]) -> tuple[str, list[Prediction]]:
    """The numerics class, and what it predicts."""
    engine = Engine(options)
    try:
        return engine.numerics_class, predict(engine, windows)
    finally:
        engine.close()


def perplexity(found: list[Prediction]) -> float:
    return math.exp(-statistics.fmean(each.logprob for each in found))


class Results:
    """Points as they come, each beside the baseline, which is the first; all are written to `out` each time."""

    def __init__(self, label: str, out: Path | None) -> None:
        self._label = label
        self._out = out
        self._baseline: list[Prediction] = []
        self.points: list[Point] = []

    def add(self, variant: str, numerics_class: str, found: list[Prediction], same_weights: float | None) -> float:
        """`same_weights`: their perplexity in float32. Returns this one's."""
        self._baseline = self._baseline or found
        mine, pairs = perplexity(found), list(zip(found, self._baseline, strict=True))
        p = Point(
            processor(), self._label, len(found), variant, numerics_class, mine, mine / perplexity(self._baseline),
            statistics.fmean(mine.likeliest == theirs.likeliest for mine, theirs in pairs),
            statistics.fmean(abs(mine.logprob - theirs.logprob) for mine, theirs in pairs),
            mine / (same_weights or perplexity(self._baseline)),
        )  # fmt: skip
        self.points.append(p)
        print(
            f"{variant:<26} perplexity {mine:8.4f} ({p.perplexity_ratio:.4f}x, kernels {p.kernel_ratio:.4f}x), "
            f"top-1 {p.agreement:7.2%}, |dlogp| {p.divergence:.4f}",
            flush=True,
        )
        if self._out:
            with self._out.open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow([field.name for field in fields(Point)])
                writer.writerows(astuple(point) for point in self.points)
        return mine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--gguf", type=Path, nargs="+", default=[], help="the same model as GGUF files")
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--window-tokens", type=int, default=512)
    parser.add_argument("--variants", nargs="*", default=VARIANTS, help=f"{BASELINE} is always among them")
    parser.add_argument("--out", type=Path, help="write a CSV")
    options = parser.parse_args()
    token_ids = Tokenizer.load(options.model).encode(text(), add_special_tokens=False)
    size = options.window_tokens - 1
    bos = Tokenizer.load(options.model).encode("", add_special_tokens=True)[:1]
    windows = [bos + token_ids[i * size : (i + 1) * size] for i in range(options.windows)]
    if len(windows[-1]) < options.window_tokens:
        sys.exit(f"the text has {len(token_ids)} tokens, fewer than {options.windows} windows of {size}")
    label = f"pydoc_data.topics of Python {sys.version.split()[0]}, {options.windows} x {options.window_tokens}"
    print(f"{processor()}, {label}")
    results = Results(label, options.out)
    files = {file.stem: file for file in options.gguf}
    for variant in dict.fromkeys([BASELINE, *options.variants, *(f"bfloat16+{name}" for name in files)]):
        dtype, _, quantization = variant.partition("+")
        if quantization not in FORMATS and quantization not in files:
            results.add(variant, *run(engine_options(options.model, dtype, quantization, "native"), windows), None)
            continue
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch) / "copy"
            if quantization in files:
                model = packed_directory(files[quantization], dtype=dtype)
                exact = convert_gguf(files[quantization], copy, dtype="float32")
            else:
                model = exact = quantized_copy(options.model, copy, quantization)
            of_same_weights = run(engine_options(exact, "float32", "", "native"), windows)
            same = results.add(f"float32+{quantization}", *of_same_weights, None)
            results.add(variant, *run(engine_options(model, dtype, "", "native"), windows), same)


if __name__ == "__main__":
    main()
