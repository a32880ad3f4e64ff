"""Tokens a step of prompt lookup in a request's own text, and in its owner's recent outputs too. Without a model.

    .venv/bin/python bench/draft_sources.py --tokenizer .cache/models/gemma-3-270m/tokenizer.json

Texts are known in advance: the first third of each is the prompt, the rest what the model says. Drafts are always
tried, in full number, so this says what there is to guess, and not what it costs.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tokenizers import Tokenizer

from engine.prompt_lookup import NgramProposer
from engine.recent_texts import RecentTexts
from engine.request import EngineRequest
from engine.sequence import Sequence
from engine.speculation import Proposer
from engine.suffix_proposer import SuffixProposer
from pagewire.sampling import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
_MOST_TOKENS, _LEAST_TOKENS = 900, 60


def records(count: int) -> list[str]:
    """JSON of one schema."""
    rng = Random(1)
    names, towns = ["Ann", "Bob", "Cara", "Dan", "Eve", "Finn"], ["Rome", "Oslo", "Lima", "Cairo"]

    def record() -> dict[str, object]:
        address = {"street": f"{rng.randint(1, 99)} Main Street", "town": rng.choice(towns)}
        person = {"first_name": rng.choice(names), "family_name": rng.choice(names) + "son", "age": rng.randint(1, 99)}
        orders = [
            {"article": rng.randint(100, 999), "amount": rng.randint(1, 9), "price_in_cents": rng.randint(10, 9999)}
            for _ in range(rng.randint(1, 3))
        ]
        return {"person": {**person, "address": {**address, "postal_code": rng.randint(1000, 9999)}}, "orders": orders}

    return [json.dumps(record()) for _ in range(count)]


def tokens_per_step(texts: list[list[int]], proposer: Proposer, ended: Callable[[Sequence], None], most: int) -> float:
    num_steps = num_tokens = 0
    for text in texts:
        num_prompt = len(text) // 3
        request = EngineRequest("r", tuple(text[:num_prompt]), SamplingParams())
        sequence = Sequence(request, 1, 0, text[:num_prompt], choices_to_sample=(0,))
        while (at := sequence.num_tokens) < len(text):
            drafts = proposer.propose(sequence, lambda kind, lag: most)
            accepted = 0
            while accepted < len(drafts) and at + accepted < len(text) and drafts[accepted] == text[at + accepted]:
                accepted += 1
            sequence.token_ids += text[at : at + accepted + 1]
            num_steps += 1
        num_tokens += len(text) - num_prompt
        ended(sequence)
    return num_tokens / num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, type=Path)
    parser.add_argument("--drafts", type=int, default=4)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    sets = {"records": records(30)}
    files = (("router", "router/*.py", 25), ("tests", "tests/engine/*.py", 20), ("docs", "docs/*.md", 14))
    for name, pattern, count in files:
        sets[name] = [file.read_text() for file in sorted(ROOT.glob(pattern))[:count]]
    for name, texts in sets.items():
        encoded = [ids[:_MOST_TOKENS] for text in texts if len(ids := tokenizer.encode(text).ids) > _LEAST_TOKENS]
        suffix = SuffixProposer(2, RecentTexts(1 << 16))
        own = tokens_per_step(encoded, NgramProposer(2, 5), lambda sequence: None, options.drafts)
        both = tokens_per_step(encoded, suffix, suffix.ended, options.drafts)
        print(f"{name:8s} {sum(map(len, encoded)):6d} tokens: ngram {own:.3f}, suffix {both:.3f} a step", flush=True)


if __name__ == "__main__":
    main()
