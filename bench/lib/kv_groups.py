"""Figures of pools whose layers are groups: sequences that fit, and hits, for published shapes; nothing is timed.

Capacity is that of `--kv-memory 40GiB` with the worker's own layout of pages and the manager's own sums. The ideal has
no rounding: each layer keeps the tokens that it reads, and nothing else. vLLM's sums are by its formulas for hybrid
models (groups of equally many layers, one page size), as of November 2026; it is not run.

Hits are those of a real ledger and agent, without a model and without want of blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from common.contracts.clock import ManualClock
from common.contracts.hashing import block_digests, block_hash_of
from common.contracts.lease import Inventory, RetainedTokens
from common.contracts.types import KvGeometry, KvGroupKind, SequenceId
from gpuworker.memory.byte_plan import GIB, bytes_per_block
from gpuworker.memory.layout import LayerShape, Reach, geometry_of, with_groups, with_states
from gpuworker.scheduling.batch_plan import StepResult
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.scheduling.sequence import NewSequence
from gpuworker.scheduling.stopping import StopRule
from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.ledger.ledger import Ledger

Figure = tuple[str, float, str]
_LEAST: Final = "tokens of the shortest prefix that hits once two other prompts began with it"
_MEMORY, _BLOCK_SIZE = 40 * GIB, 16
_LENGTHS: Final = {"1k": 1024, "8k": 8192, "64k": 65536}
_FULL: Final = Reach()


@dataclass(frozen=True, slots=True)
class Layers:
    """So many layers of one shape that read as far."""

    count: int
    shape: LayerShape
    reach: Reach = _FULL

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of a token in bfloat16, in all of these layers."""
        return 2 * self.count * self.shape.num_kv_heads * (self.shape.head_dim_k + self.shape.head_dim_v)

    def read_tokens(self, length: int) -> int:
        """Return how many of so many tokens the next one reads."""
        span = self.reach.span
        if not span:
            return length
        return min(length, span) if self.reach.kind is KvGroupKind.WINDOW else (length - 1) % span + 1


def _alike(heads: int, size: int, full: int, span: int, sliding: int) -> tuple[Layers, ...]:
    shape = LayerShape(heads, size, size)
    return Layers(full, shape), Layers(sliding, shape, Reach(KvGroupKind.WINDOW, span))


# From config.json of the named checkpoints on huggingface.co.
MODELS: Final[dict[str, tuple[Layers, ...]]] = {
    "gpt_oss_20b": _alike(8, 64, 12, 128, 12),  # openai/gpt-oss-20b
    "gpt_oss_120b": _alike(8, 64, 18, 128, 18),  # openai/gpt-oss-120b
    "gemma3_27b": _alike(16, 128, 10, 1024, 52),  # google/gemma-3-27b-it
    "gemma4_26b_a4b": (  # google/gemma-4-26B-A4B
        Layers(5, LayerShape(2, 512, 512)),
        Layers(25, LayerShape(8, 256, 256), Reach(KvGroupKind.WINDOW, 1024)),
    ),
    "llama4_scout": (  # meta-llama/Llama-4-Scout-17B-16E-Instruct
        Layers(12, LayerShape(8, 128, 128)),
        Layers(36, LayerShape(8, 128, 128), Reach(KvGroupKind.CHUNK, 8192)),
    ),
    "mimo_v2_flash": (  # XiaomiMiMo/MiMo-V2-Flash
        Layers(9, LayerShape(4, 192, 128)),
        Layers(39, LayerShape(8, 192, 128), Reach(KvGroupKind.WINDOW, 129)),
    ),
    "minimax_m2": (Layers(62, LayerShape(8, 128, 128)),),  # MiniMaxAI/MiniMax-M2
}


# Layers that attend, layers that keep a state, and the bytes of one sequence's states, by the same sources.
HYBRIDS: Final[dict[str, tuple[Layers, int, int]]] = {
    "qwen3_5_9b": (Layers(8, LayerShape(4, 256, 256)), 24, 24 * (32 * 128 * 128 * 4 + 8192 * 4 * 2)),  # Qwen/Qwen3.5-9B
    "lfm2_2_6b": (Layers(8, LayerShape(8, 64, 64)), 22, 22 * 2048 * 3 * 2),  # LiquidAI/LFM2-2.6B
}


def geometry_with_states(name: str) -> KvGeometry:
    """Return the K/V and the checkpoints of a model whose layers keep states, in bfloat16."""
    attending, mixers, state_bytes = HYBRIDS[name]
    total = attending.count + mixers
    layers = range(total - attending.count, total)
    geometry = geometry_of(dict.fromkeys(layers, attending.shape), "bfloat16", 0)
    return with_states(geometry, range(mixers), state_bytes, _BLOCK_SIZE)


def geometry_in_groups(layers: Sequence[Layers]) -> KvGeometry:
    """Return the K/V of a model in bfloat16, as a worker finds it."""
    every = [(each.shape, each.reach) for each in layers for _ in range(each.count)]
    geometry = geometry_of({number: shape for number, (shape, _) in enumerate(every)}, "bfloat16", 0)
    return with_groups(geometry, {number: reach for number, (_, reach) in enumerate(every)}, {}, _BLOCK_SIZE)


def capacity_figures(name: str) -> Iterator[Figure]:
    """Yield how many sequences of each length fit, over the ideal and over vLLM's number."""
    layers = MODELS[name]
    geometry = geometry_in_groups(layers)
    pages = _MEMORY // bytes_per_block(geometry, _BLOCK_SIZE)
    for words, length in _LENGTHS.items():
        needed = pages_of(geometry, length)
        ideal = _MEMORY / sum(each.token_bytes * each.read_tokens(length) for each in layers)
        yield f"capacity_share_{name}_{words}", pages / needed / ideal, f"sequences of {words} that fit, over the ideal"
        theirs = _MEMORY / _bytes_in_vllm(layers, length)
        yield f"capacity_over_vllm_{name}_{words}", pages / needed / theirs, "the same over vLLM's, by its formulas"
        whole = _MEMORY / (-(-length // _BLOCK_SIZE) * _BLOCK_SIZE * sum(each.token_bytes for each in layers))
        yield f"capacity_over_one_group_{name}_{words}", pages / needed / whole, "the same over all layers as one group"


def pages_of(geometry: KvGeometry, length: int) -> int:
    """Return the pages, or blocks, that a sequence of so many tokens holds once it decodes."""
    config = LedgerConfig(1, _BLOCK_SIZE, groups=geometry.groups)
    return config.admission_blocks(length)


def _bytes_in_vllm(layers: Sequence[Layers], length: int) -> int:
    """Return the bytes of a sequence in vLLM: groups have as many layers as the smallest kind, or as the largest where
    that has less than half more; all pages are as large as the largest layer's block of 16 tokens.
    """
    counts = [each.count for each in layers]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    page = max(_BLOCK_SIZE * each.token_bytes // each.count for each in layers)
    taken = 0
    for each in layers:
        slots = page // (each.token_bytes // each.count)
        blocks = -(-length // slots)
        if each.reach.kind is KvGroupKind.WINDOW:
            blocks = min(blocks, -(-(each.reach.span - 1) // slots) + 1)
        elif each.reach.kind is KvGroupKind.CHUNK:
            blocks = min(blocks, -(-each.read_tokens(length) // slots))
        taken += -(-each.count // size) * size * blocks * page
    return taken


class Pair:
    """A worker's agent and its ledger, without anything between them."""

    def __init__(self, geometry: KvGeometry, blocks: int) -> None:
        """The pool has so many blocks, or pages."""
        groups, ids = geometry.groups, itertools.count()
        config = LedgerConfig(blocks, _BLOCK_SIZE, window=geometry.window, groups=groups)
        self._ledger = Ledger(config, ManualClock(), lambda: str(next(ids)))
        self._ledger.rebuild(Inventory())
        self._agent = LeaseAgent(AgentConfig(blocks, _BLOCK_SIZE, window=geometry.window, groups=groups))
        self._agent.inventory()
        self._agent.attached(0)
        self._ids = itertools.count()

    @classmethod
    def without_want(cls, geometry: KvGeometry, tokens: int) -> Pair:
        """Return a pair with a pool in which nothing is evicted while it has served no more than so many tokens."""
        return cls(geometry, 4 * (sum(group.pages for group in geometry.groups) or 1) * tokens // _BLOCK_SIZE)

    def present(self, prompt: Sequence[int]) -> int:
        """Return how many of a prompt's leading tokens have K and V, in blocks that may be hits."""
        hashes = tuple(map(block_hash_of, block_digests(bytes(32), prompt[:-1], _BLOCK_SIZE)))
        return self._ledger.leading_blocks(hashes) * _BLOCK_SIZE

    def serve(self, prompt: Sequence[int], output: Sequence[int], marked: int = 0, priority: int = 60) -> int:
        """Serve a request alone, and return its cached tokens. Its first `marked` tokens have a priority of retention.

        `output` are the tokens that it samples, the last of which is not computed.
        """
        return self.serve_together([prompt], output, marked, priority)

    def serve_together(
        self, prompts: Sequence[Sequence[int]], output: Sequence[int], marked: int = 0, priority: int = 60
    ) -> int:
        """Serve requests that come at once, and sample the same; return their cached tokens, all together."""
        sampled = {self._submit(prompt, len(output), marked, priority): iter(output) for prompt in prompts}
        cached = 0
        while self._agent.has_work:
            if (said := self._agent.take_report()) is not None:
                self._ledger.apply_report(said)
                if (batch := self._ledger.schedule()) is not None:
                    cached += sum(admit.cached_tokens for admit in self._agent.apply_grant(batch).admitted)
            if (plan := self._agent.plan()) is not None:
                tokens = {row.sequence: (next(sampled[row.sequence]),) for row in plan.rows if row.samples}
                self._agent.complete(StepResult(plan.step, tokens))
        if (said := self._agent.take_report()) is not None:
            self._ledger.apply_report(said)
        return cached

    def _submit(self, prompt: Sequence[int], output: int, marked: int, priority: int) -> SequenceId:
        digests = block_digests(bytes(32), prompt, _BLOCK_SIZE)
        hashes, last = tuple(map(block_hash_of, digests)), digests[-1] if digests else bytes(32)
        number, length = SequenceId(next(self._ids)), len(prompt) + output
        marks = (RetainedTokens(0, marked, priority, 300.0).blocks(_BLOCK_SIZE),) if marked else ()
        stop = StopRule(output)
        self._agent.submit_sequence(NewSequence(number, "", tuple(prompt), hashes, last, length, stop, retention=marks))
        return number


def hit_figures(name: str) -> Iterator[Figure]:
    """Yield cached tokens over the best possible: a shared system prompt, and the turns of a chat."""
    geometry = geometry_in_groups(MODELS[name])
    yield f"least_hit_{name}", least_hit(geometry), _LEAST
    for shared in (240, 2000):
        _, second = itertools.islice(_shared_prompts(geometry, shared), 2)
        yield f"hits_{name}_system_{shared}", second, f"cached tokens of a system prompt of {shared}, over all"
    yield (
        f"hits_{name}_chat",
        _chat(geometry),
        "cached tokens of eight turns of 50 and 200 tokens, over the best possible",
    )


def hybrid_hit_figures(name: str) -> Iterator[Figure]:
    """Yield the same of a model whose layers keep states; the best possible is that of full attention."""
    geometry = geometry_with_states(name)
    yield f"least_hit_{name}", least_hit(geometry), _LEAST
    for shared in (240, 2000):
        words = f"cached tokens of a system prompt of {shared}, over all"
        for number, share in enumerate(itertools.islice(_shared_prompts(geometry, shared), 3), 1):
            yield f"hits_{name}_system_{shared}_request_{number}", share, f"{words}, in request {number}"
        _, second = itertools.islice(_shared_prompts(geometry, shared, marked=shared), 2)
        yield f"hits_{name}_system_{shared}_marked", second, f"{words}, in request 2, where requests mark its end"
    yield f"resume_share_{name}_chat", _chat(geometry), "cached tokens of eight turns, over those of full attention"
    yield (
        f"burst_prefix_{name}",
        _burst(geometry),
        "tokens computed of 16 prompts at once with 768 alike, over the least",
    )


def _burst(geometry: KvGeometry) -> float:
    pair, prefix, own = Pair.without_want(geometry, 32 * 1024), list(range(2, 770)), 64
    prompts = [[*prefix, *range(1000 + 100 * number, 1000 + 100 * number + own)] for number in range(16)]
    cached = pair.serve_together(prompts, [1] * 20, len(prefix))
    return (len(prompts) * (len(prefix) + own) - cached) / (len(prefix) + len(prompts) * own)


def least_hit(geometry: KvGeometry, blocks: int = 0) -> int:
    """Return the tokens of the shortest prefix that hits once two other prompts began with it; 0 where none does."""
    for shared in range(1, 2 * _BLOCK_SIZE):
        pair = Pair(geometry, blocks) if blocks else Pair.without_want(geometry, 1024)
        prefix = list(range(2, 2 + shared))
        tails = ([9000 + number, *[7] * (max(0, _BLOCK_SIZE - shared))] for number in range(3))
        cached = [pair.serve([*prefix, *tail], [1]) for tail in tails]
        if cached[-1]:
            return shared
    return 0


def _shared_prompts(geometry: KvGeometry, shared: int, marked: int = 0) -> Iterator[float]:
    """Yield how much of a system prompt is cached in each of many requests; they retain `marked` tokens."""
    pair, system = Pair.without_want(geometry, 16 * 1024), list(range(2, 2 + shared))
    for number in itertools.count():
        cached = pair.serve([*system, *range(9000 + 500 * number, 9100 + 500 * number)], [1] * 40, marked)
        yield cached / (shared // _BLOCK_SIZE * _BLOCK_SIZE)


def _chat(geometry: KvGeometry) -> float:
    pair, history, got, best = Pair.without_want(geometry, 16 * 1024), list(range(2, 302)), 0, 0
    for turn in range(8):
        got += pair.serve(history, [1] * 200)
        best += 0 if not turn else (len(history) - 50 - 1) // _BLOCK_SIZE * _BLOCK_SIZE
        history += [1] * 200
        history += range(10_000 + 50 * turn, 10_050 + 50 * turn)
    return got / best
