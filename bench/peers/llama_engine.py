"""llama.cpp's side, run by its own environment's Python: `python llama_engine.py MODEL.gguf [threads=N]`.

llama-cpp-python's low level: one context, a batch of sequences, logits of each one's last token, the likeliest next.
Prompts are read `_BATCH` tokens at a time, as many sequences as fit together.
"""

import os
import sys
import time

import llama_cpp as llama  # type: ignore[import-not-found]
from points import Points, serve  # type: ignore[import-not-found]  # a script: its folder is on the path

_BATCH = 512
_MOST_SEQUENCES = 32
_CONTEXT = 8192  # of all sequences together


class Llama:
    """A model and one context; `generate` leaves the context empty."""

    def __init__(self, path: str, threads: int) -> None:
        llama.llama_backend_init()
        self._model = llama.llama_load_model_from_file(path.encode(), llama.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"{path}: llama.cpp can't load it")
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = _CONTEXT, _BATCH, _BATCH
        params.n_seq_max, params.n_threads, params.n_threads_batch = _MOST_SEQUENCES, threads, threads
        if hasattr(params, "kv_unified"):
            params.kv_unified = True
        self._context = llama.llama_new_context_with_model(self._model, params)
        self._batch = llama.llama_batch_init(_BATCH, 0, 1)
        vocab = llama.llama_model_get_vocab(self._model)
        self._vocab_size = llama.llama_vocab_n_tokens(vocab)

    def generate(self, prompts, num_tokens):
        """So many tokens for each prompt, all prompts at once."""
        if len(prompts) > _MOST_SEQUENCES or sum(map(len, prompts)) + len(prompts) * num_tokens > _CONTEXT:
            raise ValueError(f"{len(prompts)} prompts of {len(prompts[0])} tokens don't fit {_CONTEXT}")
        rows = [
            (token, place, sequence, place == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        latest = {}
        for start in range(0, len(rows), _BATCH):
            latest |= self._run(rows[start : start + _BATCH])
        for step in range(num_tokens - 1):
            latest = self._run([(latest[s], len(p) + step, s, True) for s, p in enumerate(prompts)])
        self._clear()

    def _run(self, rows):
        """Computes (token, position, sequence, wants logits) rows; the likeliest next token of each that wants one."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, place, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, place, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if llama.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        return {row[2]: self._likeliest(i) for i, row in enumerate(rows) if row[3]}

    def _likeliest(self, index):
        import numpy as np

        logits = llama.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())

    def _clear(self) -> None:
        if hasattr(llama, "llama_memory_clear"):
            llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        else:
            llama.llama_kv_cache_clear(self._context)


def main() -> None:
    model, *options = sys.argv[1:]
    given = dict(option.split("=", 1) for option in options)
    started = time.perf_counter()
    engine = Llama(model, int(given.get("threads", len(os.sched_getaffinity(0)))))
    seconds = time.perf_counter() - started
    serve(Points(engine.generate), seconds)


if __name__ == "__main__":
    main()
