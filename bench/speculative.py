"""Speculation beside plain decoding on the same engine: copies of the prompt, a draft model, tokens without a pattern.

    python -m bench.speculative --json
    python -m bench.speculative --copy demo --rounds 5
    python -m bench.speculative --only draft --faint 0.003

One stream quotes and edits texts of its prompt, on SmolLM2 (`make smollm2`), up to the model's end of its turn. Or it
goes on from questions over the demo model's facts. A batch of 32 streams of a random model samples at temperature 1:
there is nothing to guess. Streams of a random target have the target's first layer as draft model: `--faint` sets how
often that is right, and the work of both is that of their shapes (`bench/lib/draft_pair.py`).
One stream of a random model of which three of four layers keep states repeats its prompt (`--only states`,
`bench/lib/copying_hybrid.py`), in float32 on transformers' code.

Both kinds of decoding take turns in one process. Drafts have the bits of plain decoding, so tokens must be equal. A
copy is timed from its first token on: what comes before is the prompt, which both compute alike. Figures are medians
over the rounds; a round has all prompts.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from bench.lib.copied_texts import chats
from bench.lib.copying_hybrid import SHAPES as COPYING_SHAPES
from bench.lib.copying_hybrid import begun_texts, write_copying_hybrid
from bench.lib.draft_pair import SHAPES, write_pair, write_wrong
from bench.lib.harness import parser, progress, report
from bench.lib.models import data_plane, plane_worker
from bench.lib.workers import BenchWorker, Run
from cli.benchmark.requests import Request, Workload
from cli.demo_model import CHECKPOINT
from cli.demo_model.prompts import questions, system_text
from common.checkpoint.gguf.names import gguf_file, served_folder
from common.contracts.errors import QuireError
from common.contracts.types import SamplingParams
from gpuworker.plane.checkpoint_facts import eos_token_ids
from gpuworker.scheduling.drafting import DraftPrices

_BLOCK: Final = 16
_STREAMS: Final = 32
_COPIED, _SAMPLED, _GUESSED = 160, 32, 128  # output tokens of a stream, at most
_TEMPERATURE: Final = 0.3  # a random model's distribution is flat: at 1, two nearly equal models seldom sample the same
_NOTES: Final = {
    "speedup_copy": "tokens a second of one stream that copies, over plain decoding; at least 2.0",
    "speedup_least": "the same of the prompt that gains least",
    "speedup_most": "the same of the prompt that gains most",
    "speedup_answer": "the same with the time to the first token, which is that of the prompt",
    "slowdown_random": "seconds of 32 streams without a pattern, over plain decoding; at most 1.02",
    "tokens_differing": "tokens that differ from those of plain decoding, of all runs; 0",
    "accepted_share": "drafts that were right, of all in the copies",
    "tokens_a_step": "output tokens of a step in the copies",
    "speedup_draft": "tokens a second of one stream with a draft model, over plain decoding",
    "speedup_draft_8": "the same of 8 streams",
    "slowdown_wrong_draft": "seconds of one stream with a draft model that is never right, over plain decoding",
    "draft_accepted_share": "guesses of the draft model that were right, of all, with one stream",
    "draft_tokens_a_step": "output tokens of a step with it, one stream",
    "draft_guess_share": "time of a step of the draft model, over a step of the target",
    "speedup_states": "tokens a second of one stream that copies, of a model with states, over plain decoding",
    "states_accepted_share": "drafts that were right, of all in these copies",
    "states_tokens_a_step": "output tokens of a step in them",
    "plain_copy": "tokens a second of plain decoding, one stream, from the first token on",
    "drafted_random": "drafts in the runs without a pattern",
}


@dataclass
class Pair:
    """Two engines on one model, and what their runs took."""

    plain: BenchWorker
    drafting: BenchWorker
    most: int
    """Output tokens of a stream, at most."""
    differing: int = 0
    turns: int = 0

    def run(self, workload: Workload, salt: str) -> tuple[Run, Run]:
        """Run a workload on both, the one first in one turn and the other in the next; compare tokens."""
        self.turns += 1
        workers = [self.plain, self.drafting][:: -1 if self.turns % 2 else 1]
        runs = {worker: worker.drive(workload, salt) for worker in workers}
        plain, drafting = runs[self.plain], runs[self.drafting]
        assert not self.plain.engine.load().drafted_tokens, "plain decoding has no drafts"
        self.differing += _differing(plain, drafting)
        return plain, drafting


@dataclass(frozen=True, slots=True)
class Copied:
    """The seconds of one prompt, of plain decoding and with drafts: its answer from the first token on, and all."""

    tokens: int
    answer: tuple[float, float]
    whole: tuple[float, float]

    @property
    def ratio(self) -> float:
        return self.answer[0] / self.answer[1]


def _differing(one: Run, other: Run) -> int:
    pairs = zip(one.outputs.values(), other.outputs.values(), strict=True)
    return sum(a != b for left, right in pairs for a, b in zip_longest(left, right))


def _answered(run: Run) -> float:
    """Return the seconds from the first token of a run's only stream to its last."""
    (record,) = run.records.values()
    return record.times[-1] - record.times[0]


def pair(stack: ExitStack, model: str | None, args: argparse.Namespace, **options: Any) -> Pair:
    """Return the two engines on a model, started."""
    options = {"speculative": "ngram", "threads": args.threads, "dtype": args.dtype} | options
    plane = data_plane(model, **options, kv_memory="256MiB", max_num_seqs=_STREAMS, max_model_len=1024)
    if plane.draft is not None:
        stack.callback(plane.draft.close)
    plain, drafting = plane_worker(plane, _BLOCK, new_drafter=None, draft_model=None), plane_worker(plane, _BLOCK)
    return Pair(stack.enter_context(plain), stack.enter_context(drafting), args.output)


def smollm2_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Return chats that ask to quote a text, or to edit it, in SmolLM2's template."""
    return [tokenizer.encode(each, add_special_tokens=False).ids for each in chats()]


def demo_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Return questions over the demo model's facts."""
    system = f"<|bos|><|system|> {system_text()}<|end|>"
    asked = [f"{system}<|user|> {question.text}<|end|><|assistant|>" for question in questions(6)]
    return [tokenizer.encode(each, add_special_tokens=False).ids for each in asked]


def copies(stack: ExitStack, args: argparse.Namespace) -> dict[str, float]:
    """Measure one stream that copies."""
    if args.copy == "demo":
        model, folder, make, ends = str(CHECKPOINT), CHECKPOINT, demo_prompts, frozenset[int]()
    else:
        model = str(gguf_file("smollm2"))
        folder, make = served_folder(Path(model)), smollm2_prompts
        ends = frozenset(eos_token_ids(folder))
    prompts = make(Tokenizer.from_file(str(folder / "tokenizer.json")))
    both = pair(stack, model, args)
    both.plain.stop_token_ids = both.drafting.stop_token_ids = ends
    rounds = []
    for turn in range(-1, args.rounds):  # the first one warms up
        rounds.append([_copied(both, prompt, f"{turn}.{number}") for number, prompt in enumerate(prompts)])
        progress(f"copies, round {turn + 1} of {args.rounds}", end=True)
    load = both.drafting.engine.load()
    return figures_of(rounds[1:]) | {
        "accepted_share": load.accepted_tokens / max(1, load.drafted_tokens),
        "tokens_a_step": load.tokens_sampled / max(1, load.steps),
        "differing_copy": both.differing,
    }


def _copied(both: Pair, prompt: list[int], salt: str) -> Copied:
    plain, drafting = both.run(Workload("copy", [Request("0", prompt, min(_COPIED, both.most))]), salt)
    return Copied(plain.tokens, (_answered(plain), _answered(drafting)), (plain.seconds, drafting.seconds))


def figures_of(rounds: Sequence[Sequence[Copied]]) -> dict[str, float]:
    """Return the figures of rounds of the same prompts."""

    def median(seconds: Callable[[Copied], tuple[float, float]]) -> float:
        pairs = [[seconds(each) for each in one] for one in rounds]
        return statistics.median([sum(p for p, _ in one) / sum(d for _, d in one) for one in pairs])

    ratios = [statistics.median([each.ratio for each in one]) for one in zip(*rounds, strict=True)]
    every = [each for one in rounds for each in one]
    return {
        "speedup_copy": median(lambda each: each.answer),
        "speedup_least": min(ratios),
        "speedup_most": max(ratios),
        "speedup_answer": median(lambda each: each.whole),
        "plain_copy": sum(each.tokens - 1 for each in every) / sum(each.answer[0] for each in every),
    }


def with_states(stack: ExitStack, args: argparse.Namespace) -> dict[str, float]:
    """Measure one stream that copies, of a model whose layers keep states."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-bench-states-")))
    write_copying_hybrid(folder, args.faint, COPYING_SHAPES[args.target])
    hosted = {"dtype": "float32", "device": "cpu", "model_impl": "transformers"}
    both, rounds = pair(stack, str(folder), args, **hosted), list[list[Copied]]()
    for turn in range(-1, args.rounds):  # the first one warms up
        rounds.append([_copied(both, prompt, f"{turn}.{number}") for number, prompt in enumerate(begun_texts(2))])
        progress(f"copies of a model with states, round {turn + 1} of {args.rounds}", end=True)
    load = both.drafting.engine.load()
    return {
        "speedup_states": figures_of(rounds[1:])["speedup_copy"],
        "states_accepted_share": load.accepted_tokens / max(1, load.drafted_tokens),
        "states_tokens_a_step": load.tokens_sampled / max(1, load.steps),
        "differing_states": both.differing,
    }


def with_a_draft_model(stack: ExitStack, args: argparse.Namespace) -> dict[str, float]:
    """Measure streams of a random target whose first layer guesses, and one with a draft model that knows nothing."""
    shape = SHAPES[args.target]
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-bench-draft-")))
    target, draft = write_pair(folder, args.faint, shape)
    both = _sampled_pair(stack, args, target, draft)
    figures = {"speedup_draft": 1 / _sampled(both, args, "draft, one stream", streams=1)}
    load = both.drafting.engine.load()
    figures |= {
        "draft_accepted_share": load.accepted_tokens / max(1, load.drafted_tokens),
        "draft_tokens_a_step": load.tokens_sampled / max(1, load.steps),
    }
    model = both.drafting.config.draft_model
    assert model is not None
    figures["draft_guess_share"] = model.priced(DraftPrices()).guess / load.decode_step_seconds
    figures["speedup_draft_8"] = 1 / _sampled(both, args, "draft, 8 streams", streams=8)
    wrong = _sampled_pair(stack, args, target, write_wrong(folder, shape))
    figures["slowdown_wrong_draft"] = _sampled(wrong, args, "a wrong draft model", streams=1)
    return figures | {"differing_draft": both.differing + wrong.differing}


def _sampled_pair(stack: ExitStack, args: argparse.Namespace, target: Path, draft: Path) -> Pair:
    both = pair(stack, str(target), args, speculative="draft", draft_model=str(draft))
    for worker in (both.plain, both.drafting):
        worker.sampling = SamplingParams(temperature=_TEMPERATURE, seed=7, ignore_eos=True)
    return both


def _sampled(both: Pair, args: argparse.Namespace, name: str, streams: int) -> float:
    """Return the seconds with drafts over those without: the median over the rounds, each with prompts of its own."""
    rng, ratios = random.Random(streams), list[float]()
    for turn in range(-1, args.rounds):  # the first one warms up
        prompts = [[rng.randrange(100, 2000) for _ in range(64)] for _ in range(streams)]
        requests = [Request(str(number), prompt, min(_GUESSED, both.most)) for number, prompt in enumerate(prompts)]
        plain, drafting = both.run(Workload("draft", requests), f"{name}{turn}")
        ratios += [drafting.seconds / plain.seconds] if turn >= 0 else []
        progress(f"{name}, round {turn + 1} of {args.rounds}", end=True)
    return statistics.median(ratios)


def without_a_pattern(stack: ExitStack, args: argparse.Namespace) -> dict[str, float]:
    """Measure a batch that samples at random."""
    both = pair(stack, None, args)
    rng, ratios = random.Random(1), list[float]()
    for worker in (both.plain, both.drafting):
        worker.sampling = SamplingParams(temperature=1.0, seed=7, ignore_eos=True)
    for turn in range(-1, args.rounds):
        prompts = [[rng.randrange(100, 8000) for _ in range(32)] for _ in range(_STREAMS)]
        requests = [Request(str(number), prompt, min(_SAMPLED, both.most)) for number, prompt in enumerate(prompts)]
        plain, drafting = both.run(Workload("random", requests), f"r{turn}")
        if turn >= 0:  # the first one warms up
            ratios.append(drafting.seconds / plain.seconds)
        progress(f"without a pattern, round {turn + 1} of {args.rounds}", end=True)
    drafted = both.drafting.engine.load().drafted_tokens
    return {"slowdown_random": statistics.median(ratios), "drafted_random": drafted, "differing_random": both.differing}


_PARTS: Final[Mapping[str, Callable[[ExitStack, argparse.Namespace], dict[str, float]]]] = {
    "copy": copies,
    "states": with_states,
    "draft": with_a_draft_model,
    "random": without_a_pattern,
}


def main() -> None:
    flags: argparse.ArgumentParser = parser(__doc__)
    flags.add_argument("--copy", default="smollm2", choices=["smollm2", "demo"], help="the model that copies")
    flags.add_argument("--only", choices=list(_PARTS), help="one of the parts")
    flags.add_argument(
        "--faint", type=float, default=0.01, help="weight of the layers that guesses lack: less is likelier"
    )
    flags.add_argument("--target", default="medium", choices=list(SHAPES), help="shape of random targets")
    flags.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    flags.add_argument("--threads", type=int, default=1, help="threads of the engine")
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--output", type=int, default=_COPIED, help="output tokens of a stream, at most")
    args = flags.parse_args()
    figures: dict[str, float] = {}
    try:
        for part, measure in _PARTS.items():
            if args.only in (None, part):
                with ExitStack() as stack:
                    figures |= measure(stack, args)
    except QuireError as error:
        raise SystemExit(str(error)) from error
    figures["tokens_differing"] = sum(figures.pop(name) for name in list(figures) if name.startswith("differing_"))
    report("speculative", figures, _NOTES, args.json)


if __name__ == "__main__":
    main()
