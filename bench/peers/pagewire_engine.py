"""pagewire's side: `python -m bench.peers.pagewire_engine MODEL [key=value …]`, options of `pagewire.LLM`.

Its KV memory is there before anything is measured, as that of the peers, who fill theirs with zeros.
"""

import sys
import time

from bench.peers.points import Points, serve
from pagewire import LLM, SamplingParams


def main() -> None:
    model, *options = sys.argv[1:]
    started = time.perf_counter()
    given = dict(option.split("=", 1) for option in options)
    pool = {"kv_cache_memory_bytes": "768MiB", "kv_cache_prefault": True}
    with LLM(model, max_model_len=4096, max_num_seqs=64, **pool, **given) as llm:
        seconds = time.perf_counter() - started

        def generate(prompts, num_tokens):
            llm.generate(
                list(prompts), SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True), use_tqdm=False
            )

        serve(Points(generate), seconds)


if __name__ == "__main__":
    main()
