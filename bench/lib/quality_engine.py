"""Our engine with one type of weights and of K and V, as a process that answers lines of JSON (bench/quality.py).

A line with "score" has texts as token ids: the answer has the log-probabilities that the engine gives their tokens
(`prompt_logprobs`), summed, and the token that it holds most likely at each place. One with "prompts" runs a batch of
greedy sequences.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from bench.lib.models import data_plane, plane_worker
from bench.lib.workers import BenchWorker
from cli.benchmark.requests import Request, Workload
from common.contracts.types import SamplingParams
from gpuworker.models.llama.cpu_model import LlamaCpuModel
from gpuworker.models.llama.linears import CHOICES
from gpuworker.plane.assembly import ModelPlane

_BLOCK: Final = 16
_GREEDY: Final = SamplingParams(temperature=0.0, ignore_eos=True)


class ChoiceLines(logging.Handler):
    """Keeps the log lines that say what "auto" chose."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger(CHOICES).addHandler(self)
        logging.getLogger(CHOICES).setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--folder", type=Path, required=True)
    flags.add_argument("--options", type=json.loads, required=True, help="options of the worker, as JSON")
    args = flags.parse_args()
    choices = ChoiceLines()
    plane = data_plane(str(args.folder), **args.options, max_model_len=1024, kv_memory="256MiB", max_num_seqs=16)
    serve(plane, choices.lines)


def serve(plane: ModelPlane, choices: list[str]) -> None:
    """Answer each line of standard input."""
    kinds = plane.model.packed.kinds_in_words if isinstance(plane.model, LlamaCpuModel) else "transformers"
    with plane_worker(plane, _BLOCK) as worker:
        print(json.dumps({"kinds": kinds, "choices": choices}), flush=True)
        for turn, line in enumerate(sys.stdin):
            request = json.loads(line)
            answer = _scored(worker, request["score"]) if "score" in request else _generated(worker, request, turn)
            print(json.dumps(answer), flush=True)


def _generated(worker: BenchWorker, request: dict[str, Any], turn: int) -> dict[str, Any]:
    worker.sampling = _GREEDY
    asked = [Request(str(n), prompt, request["count"]) for n, prompt in enumerate(request["prompts"])]
    run = worker.drive(Workload("batch", asked), salt=str(turn))
    return {"seconds": run.seconds, "outputs": [run.records[each.rid].tokens for each in asked]}


def _scored(worker: BenchWorker, texts: list[list[int]]) -> dict[str, Any]:
    worker.sampling = replace(_GREEDY, prompt_logprobs=1)
    run = worker.drive(Workload("score", [Request(f"{n:05d}", text, 1) for n, text in enumerate(texts)]), salt="score")
    scores = [score for _, each in sorted(run.prompt_logprobs.items()) for score in each]
    best = [score.top[0][0] if score.rank != 1 else score.token_id for score in scores]
    return {"lost": -sum(score.logprob for score in scores), "best": best}


if __name__ == "__main__":
    main()
