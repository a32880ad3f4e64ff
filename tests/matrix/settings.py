"""What can be switched on beside the plain path, and which two of it go together; docs/features.md shows it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kernels import cpu
from pagewire.sampling import SamplingParams, StructuredOutput

NUM_TOKENS = 18
ADAPTER = "tuned"
MODEL, ADAPTER_DIR, GPTQ_DIR = "<model>", "<adapter>", "<gptq>"
"""Stand for paths: of the family that the pair asks for."""
FULL, SLIDING = "llama", "gemma3"
"""Families: all layers see everything; three layers of four have a window, so that there are several KV groups."""
_MOTIFS = ((31, 57, 90), (120, 44, 120, 71), (200, 33, 81, 64, 9))
PROMPTS = {f"prompt {i}": [*motif] * (21 // len(motif)) for i, motif in enumerate(_MOTIFS)}
"""They repeat themselves, so that prompt lookup has guesses; five blocks and a rest each."""
PLAIN: Mapping[str, Any] = {
    "kernels": "native" if cpu.available() else "torch",
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
}

_DRAFTS: dict[str, Any] = {"num_speculative_tokens": 3, "least_acceptance": 0}


_ROUNDED = ("int8", "w8a8", "int8 KV", "fp8 KV")
"""Where a sum's last bits can decide which number is the nearest."""


@dataclass(frozen=True)
class Setting:
    """One thing to switch on.

    `options` are the engine's, `sampling` a request's, `model` the model served, of `family`. `changes_output`: what it
    gives is compared with itself, alone, and not with the plain path; `changes_output_of` names those with which it is
    so. `has_effect` names what must be seen to happen in one process.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    changes_output: bool = False
    has_effect: str = ""
    changes_output_of: tuple[str, ...] = ()
    model: str = MODEL
    family: str = FULL


SETTINGS: dict[str, Setting] = {
    "chunked prefill": Setting({"max_num_batched_tokens": 8}),
    "prefix caching": Setting({"enable_prefix_caching": True}, has_effect="hits"),
    "tiers": Setting({"enable_prefix_caching": True, "kv_offloading_size": "1MiB"}, has_effect="loads"),
    "preemption": Setting({"num_blocks": 22, "max_model_len": 48}, has_effect="preemptions"),
    "migration": Setting(),
    "sliding windows": Setting(family=SLIDING, changes_output=True),
    "n-gram speculation": Setting(
        {"speculative_config": json.dumps(_DRAFTS | {"prompt_lookup_min": 1})}, has_effect="drafts"
    ),
    "draft model": Setting({"speculative_config": json.dumps(_DRAFTS | {"model": MODEL})}, has_effect="drafts"),
    "LoRA": Setting({"enable_lora": True, "lora_modules": (f"{ADAPTER}={ADAPTER_DIR}",)}, changes_output=True),
    "int8": Setting({"quantization": "int8"}, changes_output=True),
    "w8a8": Setting({"quantization": "w8a8"}, changes_output=True),
    "GPTQ": Setting(model=GPTQ_DIR, changes_output=True),
    "int8 KV": Setting({"kv_cache_dtype": "int8"}, changes_output=True),
    "fp8 KV": Setting({"kv_cache_dtype": "fp8"}, changes_output=True),
    "structured output": Setting(
        sampling={"structured_output": StructuredOutput("regex", "([a-z]{2,4}-[0-9]{1,3};){4,8}"), "ignore_eos": False},
        changes_output=True,
    ),
    "n > 1": Setting(sampling={"n": 2}, changes_output=True),
    "log-probabilities": Setting(sampling={"logprobs": 2, "prompt_logprobs": 1}, changes_output=True),
    "penalties": Setting(sampling={"repetition_penalty": 1.3, "presence_penalty": 0.2}, changes_output=True),
    "TP 2": Setting({"tensor_parallel_size": 2}, changes_output_of=(*_ROUNDED, "log-probabilities")),
}  # fmt: skip

REFUSED: dict[frozenset[str], str] = {
    frozenset({"n-gram speculation", "draft model"}): "guesses come from one method at a time",
    frozenset({"int8", "w8a8"}): "weights have one form at a time",
    frozenset({"int8", "GPTQ"}): "weights have one form at a time",
    frozenset({"w8a8", "GPTQ"}): "weights have one form at a time",
    frozenset({"int8 KV", "fp8 KV"}): "the cache has one form at a time",
}
"""Pairs that cannot be, and why."""

NOTES: dict[frozenset[str], str] = {
    frozenset(
        {"prefix caching", "log-probabilities"}
    ): "a prompt whose log-probabilities are asked for is computed anew",
    frozenset({"TP 2", "int8"}): "scales are of what a rank has of a row: other weights than one process has",
    frozenset({"TP 2", "w8a8"}): "scales are of what a rank has of a row: other weights than one process has",
    frozenset({"TP 2", "int8 KV"}): "a sum's last bits, added in parts, can decide what a value is rounded to",
    frozenset({"TP 2", "fp8 KV"}): "a sum's last bits, added in parts, can decide what a value is rounded to",
    frozenset({"TP 2", "log-probabilities"}): "equal up to the last bits of their sums, which are added in parts",
    frozenset({"TP 2", "draft model"}): "the draft model runs on the first rank alone",
    frozenset({"tiers", "log-probabilities"}): "a prompt whose log-probabilities are asked for is computed anew",
}
"""What is worth knowing of pairs that work."""


@dataclass(frozen=True)
class Pair:
    """Two settings switched on together."""

    one: str
    other: str

    @property
    def settings(self) -> tuple[Setting, Setting]:
        return SETTINGS[self.one], SETTINGS[self.other]

    def has(self, name: str) -> bool:
        return name in (self.one, self.other)

    @property
    def model(self) -> str:
        """The one that isn't the usual, if there is one."""
        return next((setting.model for setting in self.settings if setting.model != MODEL), MODEL)

    @property
    def family(self) -> str:
        """The one that isn't the usual, if there is one."""
        return next((setting.family for setting in self.settings if setting.family != FULL), FULL)

    @property
    def adapter(self) -> str:
        return ADAPTER if self.has("LoRA") else ""

    @property
    def sampling(self) -> SamplingParams:
        fields: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 11}
        for setting in self.settings:
            fields |= setting.sampling
        return SamplingParams(**fields)

    @property
    def options(self) -> dict[str, Any]:
        """The engine's, with both on."""
        one, other = self.settings
        return {**PLAIN, **one.options, **other.options}

    @property
    def plain_options(self) -> dict[str, Any]:
        """The engine's, with only what is meant to change the output."""
        one, other = self.settings
        shared = dict(PLAIN)
        for setting, beside in ((one, self.other), (other, self.one)):
            if setting.changes_output or beside in setting.changes_output_of:
                shared |= setting.options
        return shared


def table() -> str:
    """As docs/features.md has it: a triangle of "yes", "no" and notes."""
    names = list(SETTINGS)
    remarks: list[str] = []
    lines = ["| | " + " | ".join(str(number) for number in range(1, len(names) + 1)) + " |"]
    lines.append("|---" * (len(names) + 1) + "|")
    for row, name in enumerate(names):
        cells = []
        for other in names[:row]:
            pair = frozenset({name, other})
            remark = REFUSED.get(pair) or NOTES.get(pair)
            if remark is not None and remark not in remarks:
                remarks.append(remark)
            mark = "" if remark is None else f" ({'abcdefghijklmnopqrstuvwxyz'[remarks.index(remark)]})"
            cells.append(("no" if pair in REFUSED else "yes") + mark)
        lines.append(f"| {row + 1} {name} | " + " | ".join([*cells, "·", *[""] * (len(names) - row - 1)]) + " |")
    notes = [f"- ({letter}) {remark}" for letter, remark in zip("abcdefghijklmnopqrstuvwxyz", remarks, strict=False)]
    return "\n".join([*lines, "", *notes])
