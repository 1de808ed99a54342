"""What a client may see of its request: its own spans and decisions, without the names of other requests.

The public plane answers with these. Requests that share a trace id, by a traceparent that several clients sent, are not
mixed: the view begins at the spans that name the request, and its tenant where callers have keys.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Final

from common.contracts.types import DecisionKind
from quire.decision.v1 import decision_pb2 as pb
from router.observe.diagnosis.outcome import PRIVATE_COUNTS, PRIVATE_TEXTS
from router.observe.trace_codec import REQUEST_ID, TENANT, UNREAD

ANOTHER: Final = "another request"
HIT_BLOCKS: Final = "hit_blocks"
# The reasons of an explanation without any worker are those of each worker, by name.
_NO_WORKER: Final = "no_worker"
_NO_WORKER_WORDS: Final = "no worker takes requests"
_PREFIX: Final = "quire.decision."
# Kinds of decisions whose candidates are other requests.
_AMONG_REQUESTS: Final = (DecisionKind.PREEMPTION, DecisionKind.SHORTFALL)
_NAMES: Final = (_PREFIX + "victim", _PREFIX + "beneficiary", REQUEST_ID)


def own_spans(found: pb.GetTraceResponse, request_id: str, tenant: str = "") -> pb.GetTraceResponse:
    """Return the spans that name a request (of a tenant, if given), and all spans below them."""
    ids = _ids_below(found.spans, request_id, tenant)
    spans = [_own_span(span, ids, found.trace_id, request_id) for span in found.spans if span.span_id in ids]
    return pb.GetTraceResponse(trace_id=found.trace_id, spans=spans)


def concerned_ids(record: pb.DecisionRecord) -> tuple[str, str, str]:
    """Return the ids of the requests that a record names."""
    return record.request_id, record.victim, record.beneficiary


def own_decision(record: pb.DecisionRecord, request_id: str) -> pb.DecisionRecord:
    """Return a copy of a record in which no other request is named."""
    own = pb.DecisionRecord()
    own.CopyFrom(record)
    own.ClearField("sequence")
    for name in ("request_id", "victim", "beneficiary"):
        setattr(own, name, _own_name(getattr(own, name), request_id))
    if own.kind == DecisionKind.PREEMPTION:  # it chooses among requests
        own.chosen = _own_name(own.chosen, request_id)
    if own.kind in _AMONG_REQUESTS:
        del own.candidates[:]
    if own.kind == DecisionKind.OUTCOME:
        _mask_outcome(own)
    return own


def own_explanation(whole: pb.ExplainResponse) -> pb.ExplainResponse:
    """Return a copy without what others do: who waits, and how busy each worker is.

    A dry run is free and leaves no record, so a caller could follow the load of others with many of them. The predicted
    time to the first token stays: a request of the caller would measure it.
    """
    own = pb.ExplainResponse()
    own.CopyFrom(whole)
    own.ClearField("requests_before")
    own.signal_ages.clear()
    own.reason = _NO_WORKER_WORDS if own.outcome == _NO_WORKER else _class_of(own.reason)
    for worker in own.workers:
        worker.rejected = _class_of(worker.rejected)
        hit_blocks = worker.figures.get(HIT_BLOCKS)
        worker.ClearField("cost")
        worker.terms.clear()
        worker.figures.clear()
        if hit_blocks is not None:
            worker.figures[HIT_BLOCKS] = hit_blocks
    return own


def _class_of(reason: str) -> str:
    """Return what stands before the details of a reason."""
    return reason.partition(":")[0]


def _mask_outcome(own: pb.DecisionRecord) -> None:
    """Leave out what other tenants sent, and who was before the request."""
    reasons = [each for each in own.reasons if each.partition(": ")[0] not in PRIVATE_TEXTS]
    del own.reasons[:]
    own.reasons.extend(reasons)
    for name in PRIVATE_COUNTS:
        own.figures.pop(name, None)


def _ids_below(spans: Iterable[pb.Span], request_id: str, tenant: str) -> set[str]:
    children: dict[str, list[str]] = {}
    ids: set[str] = set()
    for span in spans:
        children.setdefault(span.parent_span_id, []).append(span.span_id)
        if span.attributes.get(REQUEST_ID) == request_id and tenant in ("", span.attributes.get(TENANT)):
            ids.add(span.span_id)
    below = list(ids)
    while below:
        fresh = [child for child in children.get(below.pop(), ()) if child not in ids]
        ids.update(fresh)
        below += fresh
    return ids


def _own_span(span: pb.Span, ids: set[str], trace_id: str, request_id: str) -> pb.Span:
    own = pb.Span()
    own.CopyFrom(span)
    del own.links[:]
    known = {f"{trace_id}:{span_id}" for span_id in ids}
    own.links.extend(link for link in span.links if link in known)
    for attributes in (own.attributes, *(event.attributes for event in own.events)):
        _mask(attributes, request_id)
    return own


def _mask(attributes: MutableMapping[str, str], request_id: str) -> None:
    attributes.pop(UNREAD, None)
    for name in _NAMES:
        if name in attributes:
            attributes[name] = _own_name(attributes[name], request_id)
    if attributes.get(_PREFIX + "kind") == DecisionKind.PREEMPTION:
        attributes[_PREFIX + "chosen"] = _own_name(attributes[_PREFIX + "chosen"], request_id)
    if attributes.get(_PREFIX + "kind") in _AMONG_REQUESTS:
        attributes.pop(_PREFIX + "candidates", None)


def _own_name(name: str, request_id: str) -> str:
    return name if name in ("", request_id) else ANOTHER
