"""Figures of this router under the names that vLLM has for the same quantities: gateways and autoscalers ask for these.

They are made when they are read, from the figures that there are, with the model's name and no tenant. What vLLM counts
and a router does not know is left out; `docs/exposing.md` lists what is here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from common.contracts.types import FinishReason
from router.observe.metrics import RouterMetrics

# vLLM's name without its prefix -> the attribute of RouterMetrics.
_SAME: Final[Mapping[str, str]] = {
    "prompt_tokens": "prompt_tokens",
    "prompt_tokens_cached": "cached_tokens",
    "prefix_cache_queries": "prompt_tokens",
    "prefix_cache_hits": "cached_tokens",
    "generation_tokens": "generation_tokens",
    "request_success": "finished",
    "time_to_first_token_seconds": "time_to_first_token",
    "inter_token_latency_seconds": "inter_token_latency",
    "e2e_request_latency_seconds": "latency",
    "request_queue_time_seconds": "queue_time",
    "request_prompt_tokens": "request_prompt",
    "request_generation_tokens": "request_generation",
}
_ABORT: Final = "abort"
_REASONS: Final = {FinishReason.CANCELLED.value: _ABORT, FinishReason.DEADLINE.value: _ABORT}
_PREFIX: Final = "vllm:"
_MOST_NAMES: Final = 256


@dataclass(frozen=True, slots=True)
class Held:
    """What this router has now: its sequences with blocks and without, and the blocks of its workers.

    `free_blocks` are those that no sequence holds; cached ones are among them. Where pools count pages, so do both
    numbers, and `block_pages` pages hold a block of tokens in all groups of layers.
    """

    running: int
    waiting: int
    free_blocks: int
    num_blocks: int
    block_size: int
    block_pages: int = 1

    @property
    def whole_blocks(self) -> int:
        """The blocks of tokens that the workers hold where each keeps K/V of all layers."""
        return self.num_blocks // self.block_pages

    @property
    def usage(self) -> float:
        """The share of blocks that sequences hold; 0 without workers."""
        return 1.0 - self.free_blocks / self.num_blocks if self.num_blocks else 0.0


@dataclass(frozen=True, slots=True)
class HeldAdapters:
    """The adapters that sequences of this router run on, those that some wait with, and how many a worker holds."""

    running: Collection[str]
    waiting: Collection[str]
    max_in_memory: int
    time_s: float

    @property
    def labels(self) -> dict[str, str]:
        """As vLLM has them: names in one label, between commas, a bounded number of them."""
        running, waiting = (",".join(sorted(names)[:_MOST_NAMES]) for names in (self.running, self.waiting))
        return {
            "max_lora": str(self.max_in_memory),
            "running_lora_adapters": running,
            "waiting_lora_adapters": waiting,
        }


class VllmNames(Collector):
    """Exposes them; `held` is called at each reading.

    Labels are the model's served name, finish reasons and bounds of buckets: nothing that a client names. With
    `adapters` names of adapters are labels too: for operators.
    """

    def __init__(
        self,
        metrics: RouterMetrics,
        model: str,
        held: Callable[[], Held],
        adapters: Callable[[], HeldAdapters] | None = None,
    ) -> None:
        self._metrics, self._label, self._held = metrics, {"model_name": model}, held
        self._adapters = adapters

    def collect(self) -> Iterator[Metric]:
        held = self._held()
        yield self._gauge("num_requests_running", "sequences with blocks, those of this router", held.running)
        yield self._gauge("num_requests_waiting", "sequences without blocks, those of this router", held.waiting)
        yield self._gauge("kv_cache_usage_perc", "share of the workers' blocks that sequences hold", held.usage)
        sizes = {"block_size": str(held.block_size), "num_gpu_blocks": str(held.whole_blocks)}
        words = "slots of a block, and blocks of all workers, each with K/V of all layers"
        yield self._gauge("cache_config_info", words, 1.0, sizes)
        adapters = None if self._adapters is None else self._adapters()
        if adapters is not None and adapters.max_in_memory:
            # As in vLLM, the value is the time: gateways take the latest row.
            yield self._gauge("lora_requests_info", "adapters of sequences", adapters.time_s, adapters.labels)
        for name, source in _SAME.items():
            (metric,) = getattr(self._metrics, source).collect()
            yield self._renamed(metric, name)

    def _gauge(self, name: str, help_: str, value: float, more: Mapping[str, str] | None = None) -> Metric:
        metric = Metric(_PREFIX + name, help_, "gauge")
        metric.add_sample(_PREFIX + name, {**self._label, **(more or {})}, value)
        return metric

    def _renamed(self, metric: Metric, name: str) -> Metric:
        """Return a metric under another name, all tenants together."""
        made = Metric(_PREFIX + name, metric.documentation, metric.type)
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        for each in metric.samples:
            labels = {key: _REASONS.get(value, value) for key, value in each.labels.items() if key != "tenant"}
            sums[made.name + each.name.removeprefix(metric.name), tuple(labels.items())] += each.value
        for (sample, labels_), value in sums.items():
            made.add_sample(sample, {**self._label, **dict(labels_)}, value)
        return made
