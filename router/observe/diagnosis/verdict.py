"""The answer of a diagnosis: verdicts with evidence, phases with seconds, and each decision in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from router.observe.diagnosis.causes import Advice, Cause, advice_for
from router.observe.diagnosis.outcome import Phase


@dataclass(frozen=True, slots=True)
class Verdict:
    """A cause in a sentence. `share` is its part of the time in question; 0 where the question is not about time."""

    cause: Cause
    share: float
    sentence: str
    evidence: tuple[str, ...]
    advice: Advice


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """One phase, before the first token or after it; `share` is its part of the whole request."""

    phase: Phase
    after_first_token: bool
    seconds: float
    share: float
    cause: Cause


@dataclass(frozen=True, slots=True)
class Step:
    """One decision in a sentence, `offset` seconds after the request's first record."""

    offset: float
    service: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a request took its time or ended early, and why no more of its prompt was cached (None: there was no miss).

    Where all was cached and blocks were loaded from host memory, `prefix` says that.
    `missing` names what the records do not say. `total_s` and `first_token_s` are None where they are not known.
    """

    request_id: str
    tenant: str
    verdict: Verdict
    prefix: Verdict | None
    phases: tuple[PhaseSpan, ...]
    steps: tuple[Step, ...]
    missing: tuple[str, ...]
    total_s: float | None
    first_token_s: float | None


def advised(found: Diagnosis) -> list[Verdict]:
    """Return the verdicts whose advice counts; a prompt that was only computed is best helped by its prefix."""
    if found.prefix is None or found.prefix.cause in (Cause.NOT_KNOWN, Cause.LOADED):
        return [found.verdict]
    verdict = found.verdict
    if verdict.cause in (Cause.PREFILL, Cause.DECODE, Cause.MESSAGES) and verdict.advice is advice_for(verdict.cause):
        return [found.prefix]
    return [found.verdict, found.prefix]
