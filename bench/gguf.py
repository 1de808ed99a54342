"""A GGUF file on Quire's engine: kept quantised, widened, and beside llama.cpp's Python package on the same file.

    python -m bench.gguf --json
    python -m bench.gguf --peer PYTHON --json         PYTHON has llama-cpp-python

Each engine is a process of its own, without gRPC. All are loaded at once and take turns; each run is a batch of greedy
sequences of equal length, prefill included. Rates and ratios are medians over the rounds, ratios with the least and the
greatest. Perplexity is that of the repository's documents, in windows of 512 tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from bench.lib.harness import parser, progress, report
from common.checkpoint.gguf.names import gguf_file
from common.process.python import module_command

BATCHES: Final = (1, 16)
_PROMPT, _OUTPUT = 32, 96  # tokens of a sequence
_PEER: Final = Path(__file__).parent / "comparison" / "llama_cpp_engine.py"
_FIRST_ID, _LAST_ID = 100, 40_000
_NOTES: Final = {
    "start_s": "seconds from the process's start until it can take a request",
    "rss_mib": "resident memory after the runs, MiB, pages of the file among it",
    "b16": "output tokens a second of 16 sequences in one batch",
    "b1": "output tokens a second of one sequence",
    "perplexity": "of the repository's documents",
}


class EngineProcess:
    """A loaded engine that answers one line of JSON with another. Use it with `with`."""

    def __init__(self, command: list[str]) -> None:
        began = time.perf_counter()
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts = self._answer()
        self.start_seconds = time.perf_counter() - began

    def ask(self, **request: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit(f"an engine ended with status {self._process.wait()}")

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the command of each engine by its name."""
    file, threads = str(gguf_file(args.model)), str(args.threads)
    found = {}
    for dtype in args.dtype:
        for weights in ("kept", "widened"):
            flags = ("--model", file, "--threads", threads, "--dtype", dtype, "--weights", weights)
            found[f"{weights}_{dtype}"] = list(module_command("bench.lib.gguf_engine", *flags))
    if args.peer:
        found["peer"] = [args.peer, str(_PEER), "--model", file, "--threads", str(args.peer_threads)]
    return found


def prompts(count: int, seed: int) -> list[list[int]]:
    made = random.Random(seed)
    return [[made.randrange(_FIRST_ID, _LAST_ID) for _ in range(_PROMPT)] for _ in range(count)]


def measure(args: argparse.Namespace) -> dict[str, float]:
    rates: dict[str, list[float]] = {}
    figures: dict[str, float] = {}
    with ExitStack() as stack:
        engines = {}
        for name, command in commands(args).items():
            progress(f"starting {name}", end=True)
            engines[name] = stack.enter_context(EngineProcess(command))
            figures[f"start_s_{name}"] = engines[name].start_seconds
        for turn in range(-1, args.rounds):  # the first one warms up
            for batch in BATCHES:
                asked = prompts(batch, 1000 * turn + batch)
                for name, engine in engines.items():
                    done = engine.ask(prompts=asked, count=_OUTPUT)
                    if turn >= 0:
                        rates.setdefault(f"b{batch}_{name}", []).append(batch * _OUTPUT / done["seconds"])
            progress(f"round {turn + 1} of {args.rounds}", end=True)
        for name, engine in engines.items():
            if name != "peer":
                figures[f"perplexity_{name}"] = engine.ask(perplexity=True)["perplexity"]
            figures[f"rss_mib_{name}"] = engine.ask(rss=True)["mib"]
    figures |= {name: statistics.median(found) for name, found in rates.items()}
    return figures | ratios(rates, figures, args.dtype)


def ratios(rates: dict[str, list[float]], figures: dict[str, float], dtypes: list[str]) -> dict[str, float]:
    """Return what the engine with weights kept has over the others; against the peer in the first of the types."""
    found: dict[str, float] = {}
    for batch in BATCHES:
        for dtype in dtypes:
            kept, widened = rates[f"b{batch}_kept_{dtype}"], rates[f"b{batch}_widened_{dtype}"]
            found |= _spread(f"kept_over_widened_{dtype}_b{batch}", kept, widened)
        if f"b{batch}_peer" in rates:
            found |= _spread(f"ratio_gguf_b{batch}", rates[f"b{batch}_kept_{dtypes[0]}"], rates[f"b{batch}_peer"])
    for dtype in dtypes:
        both = figures[f"perplexity_kept_{dtype}"], figures[f"perplexity_widened_{dtype}"]
        found[f"perplexity_ratio_{dtype}"] = both[0] / both[1]
    return found


def _spread(name: str, ones: list[float], others: list[float]) -> dict[str, float]:
    """Return the median, the least and the greatest of the ratios of the rounds."""
    found = sorted(one / other for one, other in zip(ones, others, strict=True))
    return {name: statistics.median(found), f"{name}_least": found[0], f"{name}_greatest": found[-1]}


def main() -> None:
    flags: argparse.ArgumentParser = parser(__doc__)
    flags.add_argument("--model", default="smollm2", help="a GGUF file, or the name of one (default: smollm2)")
    flags.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    flags.add_argument("--threads", type=int, default=2, help="threads of our engine")
    flags.add_argument("--peer", metavar="PYTHON", help="a Python with llama-cpp-python")
    flags.add_argument("--peer-threads", type=int, default=2)
    flags.add_argument("--rounds", type=int, default=5)
    args = flags.parse_args()
    figures = measure(args)
    notes = {name: next((note for key, note in _NOTES.items() if name.startswith(key)), "") for name in figures}
    notes |= {name: "tokens a second, ours over llama.cpp" for name in figures if name.startswith("ratio_gguf")}
    report("gguf", figures, notes, args.json)


if __name__ == "__main__":
    main()
