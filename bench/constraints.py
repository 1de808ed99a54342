"""The cost of a constraint: the mask of a token, the compilation of a schema, and the throughput of an engine.

    python -m bench.constraints --json

Figures are by size of the vocabulary. Masks and compilation run llguidance on one thread, over a random document of the
schema. Steps run on the native CPU engine with a small model of random weights and this vocabulary. In turn none, half
and all of its rows are constrained, in one process, and all once more with masks that Python fills beside the step.
Throughput comes from the median time from step to step. A ratio is the median over rounds of one share against none in
the same round. At last one stream runs with and without drafts of forced tokens.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from bench.lib import jump_forward
from bench.lib.checkpoints import MEDIUM, SMALL
from bench.lib.harness import median_interval, parser, progress, report_columns
from bench.lib.models import data_plane
from bench.lib.tokenizers import EOS, write_tokenizer
from bench.lib.workers import BenchWorker, random_prompts
from cli.benchmark.requests import Request
from common.constraint_grammar import grammar_of, parser_limits
from common.contracts.types import Constraint, ConstraintKind, SamplingParams
from gpuworker.attention.backends import make_backend
from gpuworker.engine.ports import EngineRequest
from gpuworker.memory.kv_cache import KvCache
from gpuworker.models.llama.cpu_model import LlamaCpuModel
from gpuworker.runner.model_runner import ModelRunner, RunnerLimits
from gpuworker.runner.native_executor import NativeExecutor, native_executor
from gpuworker.sampling.rows import SampledRow
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.structured.grammars import GrammarCompiler
from gpuworker.structured.sequence import Constrained

_FIRST = 4  # steps of a run that are left out: prompts, and the first sampling after them
VOCABULARIES = {"2k": 2048, "32k": 32_000, "128k": 128_000}
SHARES = (0, 50, 100)
IN_PYTHON = 1000  # in place of a share: all rows, whose masks Python fills
SHAPES = {"small": SMALL, "medium": MEDIUM}
BLOCK_SIZE, PROMPT_TOKENS = 16, 32
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "pattern": "^[a-z]{2,12}@[a-z]{2,12}[.](com|org)$"},
        "tags": {"type": "array", "items": {"enum": ["new", "known", "former"]}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "email", "tags", "address"],
    "additionalProperties": False,
}
# A list that does not end within a run, so that all rows of a run stay to its end.
SCHEMA = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "array", "items": _PERSON, "minItems": 10_000}))
FREE = SamplingParams(temperature=1.0, ignore_eos=True)
NOTES = {
    "tokenizer_ms": "to read the tokenizer, once a worker",
    "compile_ms": "to compile the schema, up to its first mask, median of 5",
    "fill_us": "one mask, median",
    "fill_p99_us": "one mask, 99th percentile",
    "consume_us": "to take in one token, median",
    "step_ms": "a step with no row constrained, median of the rounds",
    "ratio_50": "throughput with half of the rows constrained, of that with none",
    "ratio": "throughput with all rows constrained, of that with none",
    "ratio_in_python": "the same where Python fills the masks, in turns with it",
    "ratio_low": "lower end of its 95 % interval",
    "ratio_high": "upper end of its 95 % interval",
    "cpu_us": "CPU time of all threads that a constrained token takes more than a free one",
    "cpu_ratio": "CPU time of a constrained token, of that of a free one",
    "late_share": "steps whose draw waited for masks, of all with masks that Python fills",
    "late_us": "how long those waited, mean",
}


@dataclass(frozen=True, slots=True)
class Size:
    """The amount of work."""

    rows: int
    steps: int
    rounds: int
    threads: int | None
    shape: str = "small"


@dataclass(frozen=True, slots=True)
class Round:
    """One run: seconds from step to step, the median, and CPU seconds of a token."""

    step: float
    cpu: float


class MixedWorker(BenchWorker):
    """An engine whose requests have a constraint, those with the lowest `share` per cent of the numbers."""

    share, rows = 0, 1

    def _request(self, request: Request) -> EngineRequest:
        constrained = 100 * int(request.rid) < self.share * self.rows
        made = super()._request(request)
        return replace(made, sampling=replace(made.sampling, constraint=SCHEMA if constrained else None))


def of_masks(path: Path, vocab_size: int, tokens: int) -> dict[str, float]:
    """Return the cost of compiling and of masks over one tokenizer, on this thread."""
    began = time.perf_counter()
    tokenizer = LLTokenizer(str(path), n_vocab=vocab_size, eos_token=[EOS])
    read, compiled = time.perf_counter() - began, []
    for _ in range(5):
        began = time.perf_counter()
        LLMatcher(tokenizer, grammar_of(SCHEMA), limits=parser_limits()).compute_bitmask()
        compiled.append(time.perf_counter() - began)
    grammar = GrammarCompiler(path, vocab_size, (EOS,)).compile(SCHEMA)
    followed = Constrained(grammar, SampledRow(SamplingParams(), 0), ())
    rng, fills, consumed = random.Random(0), [], []
    bits = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
    for _ in range(tokens):
        began = time.perf_counter()
        followed.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        followed.settle(bits)
        filled = time.perf_counter()
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        token = int(allowed[rng.randrange(len(allowed))])
        sampled = time.perf_counter()
        followed.consume(token)
        fills.append(filled - began)
        consumed.append(time.perf_counter() - sampled)
    return {
        "tokenizer_ms": 1e3 * read,
        "compile_ms": 1e3 * statistics.median(compiled),
        "fill_us": 1e6 * statistics.median(fills),
        "fill_p99_us": 1e6 * statistics.quantiles(fills, n=100)[-1],
        "consume_us": 1e6 * statistics.median(consumed),
    }


def of_engine(path: Path, vocab_size: int, size: Size) -> dict[str, float]:
    """Return the cost of constraints to an engine: rounds of each share, in turn."""
    length = PROMPT_TOKENS + size.steps
    config = AgentConfig(size.rows * (-(-length // BLOCK_SIZE) + 2), BLOCK_SIZE, 1 << 15, max_num_seqs=size.rows)
    shape = {**SHAPES[size.shape], "vocab_size": vocab_size}
    options = {"dtype": "float32", "threads": size.threads, "kv_blocks": 64, "max_model_len": 512}
    plane = data_plane(None, shape, device="cpu", **options)
    cache = KvCache(plane.identity.kv_geometry, config.num_blocks, BLOCK_SIZE, plane.model.device)
    limits = RunnerLimits(size.rows, length, size.threads or 0)
    assert isinstance(plane.model, LlamaCpuModel), "the native library was not built"
    runner = ModelRunner(plane.model, cache, make_backend("auto", cache), limits, native_executor, (EOS,))
    runner.constrain(GrammarCompiler(path, vocab_size, (EOS,)))
    assert isinstance(runner.executor, NativeExecutor)
    worker = MixedWorker(runner, config, None)
    worker.sampling, worker.rows = FREE, size.rows
    turns = (*SHARES, IN_PYTHON)
    rounds: dict[int, list[Round]] = {share: [] for share in turns}
    native_too = runner.follows_constraints
    with worker:
        for number in range(-1, size.rounds):  # the first round is a warm-up
            for share in turns if number % 2 else turns[::-1]:
                runner.follows_constraints = native_too and share != IN_PYTHON
                worker.share, runner.executor.spent, before = share, [], time.process_time()
                worker.load(random_prompts(size.rows, PROMPT_TOKENS, number), size.steps)
                cpu = (time.process_time() - before) / (size.rows * size.steps)
                steps = [each.idle_before + each.took for each in runner.executor.spent[_FIRST:]]
                if number >= 0:
                    rounds[share].append(Round(statistics.median(steps), cpu))
    plane.runner.close()
    return _costs(rounds) | _lateness(runner)


def _costs(rounds: Mapping[int, list[Round]]) -> dict[str, float]:
    def compared(share: int) -> list[float]:
        return [free.step / other.step for free, other in zip(rounds[0], rounds[share], strict=True)]

    middle, low, high = median_interval(compared(100))
    free = statistics.median(each.cpu for each in rounds[0])
    more = statistics.median(a.cpu - b.cpu for a, b in zip(rounds[100], rounds[0], strict=True))
    return {
        "step_ms": 1e3 * statistics.median(each.step for each in rounds[0]),
        "ratio_50": statistics.median(compared(50)),
        "ratio": middle,
        "ratio_in_python": statistics.median(compared(IN_PYTHON)),
        "ratio_low": low,
        "ratio_high": high,
        "cpu_us": 1e6 * more,
        "cpu_ratio": 1 + more / free,
    }


def _lateness(runner: ModelRunner) -> dict[str, float]:
    steps, late, seconds = runner.mask_lateness
    return {"late_share": late / max(1, steps), "late_us": 1e6 * seconds / max(1, late)}


def measure(vocab_size: int, size: Size) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="quire-bench-tokenizer-") as folder:
        path = Path(folder) / "tokenizer.json"
        write_tokenizer(path, vocab_size)
        return of_masks(path, vocab_size, 2 * size.steps) | of_engine(path, vocab_size, size)


def of_forced_tokens(size: Size) -> dict[str, float]:
    """Return what drafting forced tokens brings to one stream, over the vocabulary that real models come nearest to."""
    vocab_size = VOCABULARIES["32k"]
    with tempfile.TemporaryDirectory(prefix="quire-bench-tokenizer-") as folder:
        path = Path(folder) / "tokenizer.json"
        write_tokenizer(path, vocab_size)
        grammars, sampling = GrammarCompiler(path, vocab_size, (EOS,)), replace(FREE, constraint=SCHEMA)
        return jump_forward.measure(SHAPES[size.shape], grammars, sampling, size.steps, size.rounds, size.threads)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--vocabulary", nargs="+", choices=list(VOCABULARIES), default=list(VOCABULARIES))
    flags.add_argument("--rows", type=int, default=16, help="sequences in a step")
    flags.add_argument("--steps", type=int, default=150, help="tokens of each sequence")
    flags.add_argument("--rounds", type=int, default=7, help="runs of each share of constrained rows")
    flags.add_argument("--threads", type=int, help="threads of the engine; unset: as many as a worker takes")
    flags.add_argument("--shape", choices=sorted(SHAPES), default="small", help="size of the model")
    args = flags.parse_args()
    size = Size(args.rows, args.steps, args.rounds, args.threads, args.shape)
    columns: dict[str, Mapping[str, float]] = {}
    for name in args.vocabulary:
        progress(f"vocabulary of {name}")
        columns[name] = measure(VOCABULARIES[name], size)
    report_columns("constraints", columns, NOTES | jump_forward.NOTES, args.json, of_forced_tokens(size))


if __name__ == "__main__":
    main()
