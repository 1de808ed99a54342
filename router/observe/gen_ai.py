"""What OpenTelemetry's conventions for generative AI say of a request: attributes of its span, and metrics.

The text of prompts, outputs and stop strings is in no attribute, though the conventions have names for them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Histogram

from common.contracts import gen_ai_names as names
from common.contracts.types import ConstraintKind, FinishReason
from router.contracts.events import Finished, ValidatedRequest
from router.contracts.refusals import FAULTS
from router.observe.diagnosis.outcome import Outcome

Value = str | int | float | Sequence[str]
_ABNORMAL: Final = (FinishReason.CANCELLED, FinishReason.DEADLINE)
_ERRORS: Final = frozenset((*FAULTS, *(each.value for each in FinishReason)))
_LABELS: Final = (names.OPERATION_NAME, names.PROVIDER_NAME, names.REQUEST_MODEL, names.RESPONSE_MODEL)


def span_name(request: ValidatedRequest, model: str) -> str:
    """Return the name of the span that stands for the inference; `model` is that of a request that names none."""
    return f"{operation_of(request)} {request.model or model}".rstrip()


def operation_of(request: ValidatedRequest) -> str:
    """Return what the conventions call the operation, one of OPERATIONS."""
    return names.EMBEDDINGS if request.embeds else names.CHAT if request.chat else names.COMPLETION


def request_attributes(request: ValidatedRequest, model: str) -> dict[str, Value]:
    """Return what was asked for; `model` is what the request gets if it names none."""
    whole: dict[str, Value] = {
        names.OPERATION_NAME: operation_of(request),
        names.PROVIDER_NAME: names.PROVIDER,
        names.REQUEST_MODEL: request.model or model,
    }
    if request.session:
        whole[names.CONVERSATION_ID] = request.session
    return whole if request.embeds else whole | _sampling(request)


def _sampling(request: ValidatedRequest) -> dict[str, Value]:
    """Return the parameters with which tokens are sampled, defaults filled in; a top_k of 0 is none."""
    sampling, constraint = request.sampling, request.sampling.constraint
    some: dict[str, Value] = {}
    if sampling.n != 1:
        some[names.REQUEST_CHOICE_COUNT] = sampling.n
    if sampling.top_k:
        some[names.REQUEST_TOP_K] = sampling.top_k
    if not request.whole:
        some[names.REQUEST_STREAM] = True
    if constraint is not None:
        some[names.OUTPUT_TYPE] = names.JSON if constraint.kind is ConstraintKind.JSON_SCHEMA else names.TEXT
    return some | {
        names.REQUEST_MAX_TOKENS: sampling.max_tokens,
        names.REQUEST_TEMPERATURE: sampling.temperature,
        names.REQUEST_TOP_P: sampling.top_p,
        names.REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty,
        names.REQUEST_PRESENCE_PENALTY: sampling.presence_penalty,
        names.REQUEST_SEED: sampling.seed,
    }


def response_attributes(
    ends: Mapping[int, Finished], model: str, response_id: str, sequences: int = 1
) -> dict[str, Value]:
    """Return what came, of so many sequences; `ends` are those that ended, by their index. Nothing before the first.

    The prompt counts once: its sequences share it. Of tokens from the cache nothing is said where there are none.
    """
    if not ends:
        return {}
    ordered = [ends[index] for index in sorted(ends)]
    cached = ordered[0].usage.cached_tokens
    hits: dict[str, Value] = {names.USAGE_CACHED_TOKENS: cached} if cached else {}
    return hits | {
        names.RESPONSE_ID: response_id,
        names.RESPONSE_MODEL: model,
        names.RESPONSE_FINISH_REASONS: [_finish_reason(ends.get(index)) for index in range(sequences)],
        names.USAGE_INPUT_TOKENS: ordered[0].usage.prompt_tokens,
        names.USAGE_OUTPUT_TOKENS: sum(each.usage.output_tokens for each in ordered),
    }


def _finish_reason(end: Finished | None) -> str:
    return names.ERROR if end is None or end.reason in _ABNORMAL else end.reason.value


class ServerMetrics:
    """The histograms of a model server that the conventions have, one value a request, in seconds.

    A trace id beside a value is an exemplar. A request that names the model by one of `aliases` keeps that name; any
    other name is that of `model`, so that operators choose the values of each label.
    """

    def __init__(self, registry: CollectorRegistry, model: str, aliases: Collection[str] = ()) -> None:
        self._model, self._asked = model, frozenset((model, *aliases))
        self._duration = _histogram(registry, names.REQUEST_DURATION, names.ERROR_TYPE)
        self._first_token = _histogram(registry, names.TIME_TO_FIRST_TOKEN)
        self._output_token = _histogram(registry, names.TIME_PER_OUTPUT_TOKEN)
        # A rate misses the event with which a figure first appears.
        for operation in names.OPERATIONS:
            self._duration.labels(operation, names.PROVIDER, model, model, "")
            if operation != names.EMBEDDINGS:
                self._first_token.labels(operation, names.PROVIDER, model, model)
                self._output_token.labels(operation, names.PROVIDER, model, model)

    def ended(self, request: ValidatedRequest, outcome: Outcome, trace_id: str, begins: bool = True) -> None:
        """Count a request that was served or failed; one that does not begin here has no first token here.

        `trace_id` is "" where the request has no trace. Tokens count for a sequence on average.
        """
        self.failed(request, outcome.total_s, outcome.ended if outcome.failure else "", trace_id)
        if outcome.failure or request.embeds or not begins or not outcome.has_first_token:
            return
        labels, exemplar = self._labels(request), _exemplar(trace_id)
        self._first_token.labels(*labels).observe(outcome.first_token_s, exemplar)
        further = outcome.output_tokens / max(1, outcome.sequences) - 1
        if further > 0:
            seconds = (outcome.total_s - outcome.first_token_s) / further
            self._output_token.labels(*labels).observe(seconds, exemplar)

    def failed(self, request: ValidatedRequest, seconds: float, error: str, trace_id: str) -> None:
        """Count the duration of a request alone; `error` is the reason of its failure, "" for a success."""
        known = error if not error or error in _ERRORS else names.OTHER_ERROR
        self._duration.labels(*self._labels(request), known).observe(seconds, _exemplar(trace_id))

    def _labels(self, request: ValidatedRequest) -> tuple[str, ...]:
        asked = request.model if request.model in self._asked else self._model
        return operation_of(request), names.PROVIDER, asked, self._model


def _histogram(registry: CollectorRegistry, of: names.ServerHistogram, *more: str) -> Histogram:
    labels = [names.prometheus_label(each) for each in (*_LABELS, *more)]
    return Histogram(names.prometheus_name(of), of.words, labels, buckets=of.bounds, registry=registry)


def _exemplar(trace_id: str) -> dict[str, str] | None:
    return {"trace_id": trace_id} if trace_id else None
