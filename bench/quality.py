"""What each type of weights and of K and V loses, beside its speed: perplexity and greedy agreement on a real text.

    make smollm2 quality-text
    python -m bench.quality --json

The text is a novel in the public domain (`bench/lib/real_text.py`). The engine itself scores it (`prompt_logprobs`), in
windows of 512 tokens that know nothing of each other. Agreement is the share of places at which the most likely token
is that of bf16. Every type is a process of its own, which takes turns with one of bf16 in the runs that are timed. The
model is SmolLM2-135M-Instruct. Its file has four bits a weight; all types but "kept" begin with what these stand for,
in bf16.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from bench.gguf import EngineProcess
from bench.lib.gguf_engine import widened
from bench.lib.harness import end_with_json, parser, progress
from bench.lib.real_text import real_text
from common.checkpoint.gguf.names import served_folder
from common.process.python import module_command

REFERENCE: Final = "weights_bf16"
BATCHES: Final = (1, 16)
_WINDOW: Final = 512
_PROMPT, _OUTPUT = 64, 48  # tokens of a timed sequence
_BF16: Final = {"dtype": "bfloat16"}
TYPES: Final[Mapping[str, Mapping[str, str]]] = {
    REFERENCE: _BF16,
    "weights_float32": {"dtype": "float32"},
    "weights_float16": {"dtype": "float16"},
    "weights_kept": _BF16,
    **{f"weights_{each}": _BF16 | {"quantization": each} for each in ("int8", "w8a8", "int4", "auto")},
    **{f"kv_{each}": _BF16 | {"kv_cache_dtype": each} for each in ("float32", "float16", "int8", "fp8")},
}


@dataclass(frozen=True, slots=True)
class Quality:
    """What one type scored: nats lost on all tokens, the most likely token at each place.

    `rates` are pairs of tokens a second, of the type and of bf16 beside it, by the size of the batch.
    """

    kinds: str
    choices: Sequence[str]
    lost: float
    best: Sequence[int]
    rates: Mapping[int, list[tuple[float, float]]] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        return math.exp(self.lost / len(self.best))


def agreement(found: Quality, reference: Quality) -> float:
    """Return the share of places at which both hold the same token most likely."""
    same = sum(ours == theirs for ours, theirs in zip(found.best, reference.best, strict=True))
    return same / len(reference.best)


def figures(found: Mapping[str, Quality]) -> dict[str, float]:
    """Return the figures of all types by name."""
    reference, figures = found[REFERENCE], {"tokens": float(len(found[REFERENCE].best))}
    for name, each in found.items():
        figures[f"ppl_{name}"] = each.perplexity
        figures[f"ppl_ratio_{name}"] = each.perplexity / reference.perplexity
        figures[f"agreement_{name}"] = agreement(each, reference)
        for batch, rates in each.rates.items():
            figures[f"tok_s_b{batch}_{name}"] = statistics.median(ours for ours, _ in rates)
            figures[f"speed_b{batch}_{name}"] = statistics.median(ours / bf16 for ours, bf16 in rates)
    return figures


class Engines:
    """Starts the engine of a type, on the file's folder or on its weights in bf16."""

    def __init__(self, args: argparse.Namespace, folder: Path, source: Path) -> None:
        self._args, self._folder, self._source = args, folder, source

    def start(self, name: str) -> EngineProcess:
        options = {**TYPES[name], "threads": self._args.threads}
        chosen = str(self._folder if name == "weights_kept" else self._source)
        command = module_command("bench.lib.quality_engine", "--folder", chosen, "--options", json.dumps(options))
        return EngineProcess(list(command))


def measure(args: argparse.Namespace) -> dict[str, Quality]:
    """Score the text with an engine of each type, and time it in turns with that of bf16."""
    folder = served_folder(Path(args.model))
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(real_text(args.kib << 10)).ids
    windows = [ids[begin : begin + _WINDOW] for begin in range(0, len(ids) - _WINDOW + 1, _WINDOW)]
    with ExitStack() as stack:
        source = widened(folder, Path(stack.enter_context(tempfile.TemporaryDirectory())), torch.bfloat16)
        engines = Engines(args, folder, source)
        reference = stack.enter_context(engines.start(REFERENCE))
        found = {REFERENCE: _quality(reference, windows)}
        for name in (each for each in args.type if each != REFERENCE):
            with engines.start(name) as engine:
                found[name] = replace(_quality(engine, windows), rates=_rates(engine, reference, args.rounds, ids))
            progress(f"{name}: perplexity {found[name].perplexity:.3f}", end=True)
    return found


def _quality(engine: EngineProcess, windows: Sequence[Sequence[int]]) -> Quality:
    return Quality(**engine.facts, **engine.ask(score=windows))


def _rates(
    engine: EngineProcess, reference: EngineProcess, rounds: int, ids: Sequence[int]
) -> dict[int, list[tuple[float, float]]]:
    made, rates = random.Random(0), {batch: list[tuple[float, float]]() for batch in BATCHES}
    for turn in range(-1, rounds):  # the first one warms up
        for batch, pairs in rates.items():
            starts = [made.randrange(len(ids) - _PROMPT) for _ in range(batch)]
            asked = [ids[start : start + _PROMPT] for start in starts]
            ours, bf16 = (each.ask(prompts=asked, count=_OUTPUT)["seconds"] for each in (engine, reference))
            if turn >= 0:
                pairs.append((batch * _OUTPUT / ours, batch * _OUTPUT / bf16))
    return rates


def print_table(figures: Mapping[str, float], found: Mapping[str, Quality]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False, title="bench.quality", title_justify="left")
    table.add_column("type")
    columns = {"ppl": "perplexity", "ppl_ratio": "over bf16", "agreement": "agreement"}
    columns |= {f"tok_s_b{batch}": f"tokens/s, {batch} at once" for batch in BATCHES}
    columns |= {f"speed_b{batch}": f"over bf16, {batch}" for batch in BATCHES}
    for heading in columns.values():
        table.add_column(heading, justify="right")
    for name in found:
        values = (figures.get(f"{column}_{name}") for column in columns)
        table.add_row(name, *("-" if value is None else f"{value:.4g}" for value in values))
    Console(highlight=False, width=140).print(table)
    for name, each in found.items():
        print(f"{name}: {each.kinds}", *each.choices, sep="\n    ")


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--model", default="smollm2", help="a GGUF file, or the name of one (default: smollm2)")
    flags.add_argument("--type", nargs="+", default=list(TYPES), choices=list(TYPES), metavar="TYPE")
    flags.add_argument("--threads", type=int, default=2)
    flags.add_argument("--kib", type=int, default=64, help="size of the text that is scored, KiB")
    flags.add_argument("--rounds", type=int, default=5)
    args = flags.parse_args()
    found = measure(args)
    result = figures(found)
    print_table(result, found)
    auto: dict[str, Any] = {"auto": list(found["weights_auto"].choices)} if "weights_auto" in found else {}
    end_with_json("quality", result, args.json, auto)


if __name__ == "__main__":
    main()
