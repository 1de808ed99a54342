"""The plan of `quire bench`: which runs fit into the seconds that are left, judged by a first request.

The estimates are high on purpose: a step of several streams is taken to cost each of them the time of a token of a
prefill. So a run that is begun ends in time, whatever the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from router.placement.worker_model import Capacity as Pool

STREAMS: Final = (1, 8, 32)
PROMPTS: Final = (512, 2048)
DECODE_PROMPT: Final = 32
_WANTED: Final[Sequence[tuple[Literal["streams", "ttft"], int]]] = (
    ("streams", 1),
    ("ttft", 512),
    ("streams", 8),
    ("streams", 32),
    ("ttft", 2048),
)
"""What is measured, the most telling first."""
_SHARE: Final = 0.09  # of the seconds for each of them: the rest is for the alternatives
_LONGEST_SLOT: Final = 9.0  # seconds
_REPEATS: Final = 5
MOST_REPEATS: Final = 12
_RUNS_OF_A_SLOT: Final = 5  # before slack and prefill: about three remain
_LEAST_OUTPUT, _MOST_OUTPUT = 16, 256
_SLACK: Final = 1.25
_LEAST_SECONDS: Final = 1e-4  # of a step: less cannot be told at a client

COMPARED_STREAMS: Final = 8
_COMPARED_PROMPT, _COMPARED_OUTPUT, _COMPARED_SECONDS = 256, (8, 64), 1.0
TURNS: Final = 5
_START_SLACK: Final = 1.3
_STOP_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """The limits of a served model, in tokens and sequences; `slots` is the size of its KV pool."""

    max_model_len: int
    max_num_seqs: int
    slots: int


def slots_in(pool: Pool, length: int) -> int:
    """Return how many tokens a pool holds; where it counts pages, those of sequences of so many tokens."""
    if not pool.groups:
        return pool.num_blocks * pool.block_size
    return pool.num_blocks // pool.blocks(length, length) * length


@dataclass(frozen=True, slots=True)
class FirstRequest:
    """A first request alone: tokens of its prompt, seconds to its first token, seconds of each step after it."""

    prompt: int
    first_token: float
    step: float

    @staticmethod
    def seen(prompt: int, submitted: float, times: Sequence[float]) -> FirstRequest:
        """Return what a client saw. A quick model sends several tokens at once: a step is the mean latency."""
        step = (times[-1] - times[0]) / max(1, len(times) - 1)
        return FirstRequest(prompt, max(_LEAST_SECONDS, times[0] - submitted), max(_LEAST_SECONDS, step))

    @property
    def seconds_per_token(self) -> float:
        """Seconds of a token of a prefill, at most."""
        return self.first_token / self.prompt

    def step_of(self, streams: int) -> float:
        """Return the seconds of a step of so many streams, at most."""
        return self.step + (streams - 1) * self.seconds_per_token


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement: `repeats` times so many streams at once, of equal lengths. `seconds` is what it may take."""

    kind: Literal["streams", "ttft"]
    streams: int
    prompt: int
    output: int
    repeats: int
    seconds: float

    @property
    def name(self) -> str:
        if self.kind == "ttft":
            return f"first token after {self.prompt:,} tokens"
        return _streams_in_words(self.streams)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What is not measured, and why."""

    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    runs: tuple[Run, ...]
    left_out: tuple[LeftOut, ...]


def plan(capacity: Capacity, first: FirstRequest, seconds: float) -> Plan:
    """Return the runs that fit into these seconds, in their order, and what is left out."""
    runs: list[Run] = []
    left_out: list[LeftOut] = []
    left = seconds
    slot = min(_LONGEST_SLOT, _SHARE * seconds)
    for kind, count in _WANTED:
        made = _streams(count, capacity, first, slot) if kind == "streams" else _ttft(count, capacity, first, slot)
        if isinstance(made, Run) and made.seconds > left:
            made = LeftOut(made.name, f"takes up to {made.seconds:.0f} s, and {max(0.0, left):.0f} s are left")
        if isinstance(made, LeftOut):
            left_out.append(made)
            continue
        if made.kind == "ttft" and made.prompt < count:
            left_out.append(_cut(count, made, capacity))
        if not any((each.kind, each.streams, each.prompt) == (kind, made.streams, made.prompt) for each in runs):
            runs.append(made)
            left -= made.seconds
    return Plan(tuple(runs), tuple(left_out))


def _streams(count: int, capacity: Capacity, first: FirstRequest, slot: float) -> Run | LeftOut:
    what = _streams_in_words(count)
    if count > capacity.max_num_seqs:
        return LeftOut(what, f"at most {capacity.max_num_seqs} sequences run in a step (--max-num-seqs)")
    prompt = max(1, min(DECODE_PROMPT, capacity.max_model_len // 2))
    step = first.step_of(count)
    room = capacity.max_model_len - prompt
    output = min(room, max(_LEAST_OUTPUT, min(_MOST_OUTPUT, int(slot / _RUNS_OF_A_SLOT / step))))
    if count * (prompt + output) > capacity.slots:
        return LeftOut(what, f"the KV pool holds {capacity.slots} tokens, and they need {count * (prompt + output)}")
    once = _SLACK * (count * prompt * first.seconds_per_token + output * step)
    return _repeated("streams", count, prompt, output, once, slot)


def _ttft(wanted: int, capacity: Capacity, first: FirstRequest, slot: float) -> Run | LeftOut:
    prompt = max(1, min(wanted, capacity.max_model_len - 1))
    return _repeated("ttft", 1, prompt, 1, _SLACK * prompt * first.seconds_per_token, slot)


def _cut(wanted: int, made: Run, capacity: Capacity) -> LeftOut:
    length = f"the model's length is {capacity.max_model_len:,}"
    return LeftOut(f"first token after {wanted:,} tokens", f"{length}: measured after {made.prompt:,}")


def _repeated(
    kind: Literal["streams", "ttft"], streams: int, prompt: int, output: int, once: float, slot: float
) -> Run:
    repeats = max(1, min(_REPEATS, int(slot / once)))
    return Run(kind, streams, prompt, output, repeats, repeats * once)


def _streams_in_words(count: int) -> str:
    return "1 stream" if count == 1 else f"{count} streams"


def compared_run(capacity: Capacity, first: FirstRequest) -> Run:
    """Return the run by which alternatives are compared: streams behind prompts that the prefix cache serves again."""
    streams = max(1, min(COMPARED_STREAMS, capacity.max_num_seqs))
    prompt = max(1, min(_COMPARED_PROMPT, capacity.max_model_len // 2, capacity.slots // streams // 2))
    step = first.step_of(streams)
    least, most = _COMPARED_OUTPUT
    output = min(prompt, max(least, min(most, int(_COMPARED_SECONDS / step))))
    return Run("streams", streams, prompt, output, TURNS, 2 * TURNS * _SLACK * output * step)


def seconds_of_comparison(run: Run, first: FirstRequest, start_seconds: float) -> float:
    """Return what a comparison takes: the other suite's start and stop, its prefills, and the turns of both."""
    prefill = run.streams * run.prompt * first.seconds_per_token
    return _START_SLACK * start_seconds + prefill + run.seconds + _STOP_SECONDS
