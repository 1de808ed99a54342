"""llama.cpp through llama-cpp-python, as a process that answers lines of JSON (bench/gguf.py).

It runs in an environment of its own and needs nothing of Quire. All sequences of a request are one batch: their prompts
are computed together, then one token of each a step, greedy.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from typing import Any

import llama_cpp
import numpy as np

_MOST_SEQUENCES, _CONTEXT = 16, 512


class LlamaCpp:
    """A model with a context of 16 sequences."""

    def __init__(self, path: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = _CONTEXT * _MOST_SEQUENCES, 2048, 512
        options.n_seq_max, options.n_threads, options.n_threads_batch = _MOST_SEQUENCES, threads, threads
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._batch = llama_cpp.llama_batch_init(2048, 0, 1)

    def generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        outputs: list[list[int]] = [[] for _ in prompts]
        items = [
            (token, place, index, place == len(prompt) - 1)
            for index, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        for step in range(count):
            self._decode(items)
            kept = [place for place, item in enumerate(items) if item[3]]
            for index, place in enumerate(kept):
                outputs[index].append(self._best(place))
            items = [(output[-1], len(prompts[index]) + step, index, True) for index, output in enumerate(outputs)]
        return outputs

    def _decode(self, items: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(items)
        for place, (token, position, sequence, kept) in enumerate(items):
            batch.token[place], batch.pos[place], batch.logits[place] = token, position, kept
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            raise SystemExit(f"llama_decode returned {status}")

    def _best(self, place: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, place)
        pointer = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(pointer, (self._vocab_size,)).argmax())


def resident_mib() -> float:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--model", required=True)
    flags.add_argument("--threads", type=int, required=True)
    args = flags.parse_args()
    model = LlamaCpp(args.model, args.threads)
    print(json.dumps({"version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {"mib": resident_mib()}
        if "prompts" in request:
            began = time.perf_counter()
            outputs = model.generate(request["prompts"], request["count"])
            answer = {"seconds": time.perf_counter() - began, "outputs": outputs}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
