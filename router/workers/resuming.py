"""What lets another router go on with a request: what travels with its sequences, and what a router finds of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.contracts.errors import FieldViolation, InvalidRequest, NotFound
from common.contracts.types import Usage

# The words for an unknown request are those for another tenant's: no one learns which ids are in use.
UNKNOWN = (
    "no request {} of this caller can be resumed: it has ended, its time to be resumed is over, or it is unknown; "
    "send it again"
)


@dataclass(frozen=True, slots=True)
class Continuation:
    """What travels with a sequence for other routers. Seconds count from the request's arrival at its first router.

    `usage_before` and the two times are of earlier runs of the sequence.
    """

    stop: tuple[str, ...] = ()
    kept_special_tokens: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    salt: str = ""
    submitted_seconds: float = 0.0
    admitted_seconds: float | None = None
    first_token_seconds: float | None = None
    usage_before: Usage | None = None


@dataclass(frozen=True, slots=True)
class Orphan:
    """One sequence of a lost router. `sequence` names it at its worker; seconds are those until it was found.

    `earlier` is its output at earlier workers, and `output_tokens` counts what came since.
    """

    sequence: int
    index: int
    prompt_tokens: int
    earlier: tuple[int, ...]
    output_tokens: int
    continuation: Continuation
    logprobs_dropped: int = 0
    prompt_logprobs_dropped: int = 0
    submitted_seconds: float = 0.0
    orphaned_seconds: float = 0.0
    admitted_seconds: float | None = None
    first_token_seconds: float | None = None
    last_token_seconds: float | None = None
    ended: bool = False
    prompt_logprobs_before: int = 0

    @property
    def total(self) -> int:
        """Output tokens of all its runs."""
        return len(self.earlier) + self.output_tokens


@dataclass(frozen=True, slots=True)
class Received:
    """What a client has of its request, by sequence index; 0 for an index without an entry."""

    request_id: str
    tokens: tuple[int, ...] = ()
    prompt_logprobs: int = 0
    # Whether what the client has is given once more, for an API that makes its events of whole outputs.
    again: bool = field(default=False)

    def of(self, index: int) -> int:
        return self.tokens[index] if index < len(self.tokens) else 0

    def check(self, orphans: Sequence[Orphan], logprobs: bool) -> None:
        """Raise InvalidRequest for more tokens than there are, NotFound where log-probabilities are gone."""
        wrong = list(self._beyond(orphans))
        if wrong:
            raise InvalidRequest(*wrong)
        for orphan in orphans:
            lost = len(orphan.earlier) + orphan.logprobs_dropped if logprobs else 0
            first = 0 if self.again else self.of(orphan.index)
            if first < lost:
                raise NotFound(f"log-probabilities of output tokens {first} to {lost - 1} are kept no longer; {_AGAIN}")
            dropped = orphan.prompt_logprobs_before + orphan.prompt_logprobs_dropped if not orphan.index else 0
            if self.prompt_logprobs < dropped:
                raise NotFound(f"the first {dropped} log-probabilities of the prompt are kept no longer; {_AGAIN}")

    def _beyond(self, orphans: Sequence[Orphan]) -> list[FieldViolation]:
        totals = {orphan.index: orphan.total for orphan in orphans}
        return [
            FieldViolation(f"resume.output_tokens_received[{index}]", _beyond_words(count, totals.get(index)))
            for index, count in enumerate(self.tokens)
            if count > totals.get(index, 0)
        ]


_AGAIN = "send the request again"


def _beyond_words(count: int, total: int | None) -> str:
    if total is None:
        return f"is {count}, and the request has no such sequence; expected one entry for each of its sequences"
    return f"is {count}, and the output has {total} tokens; expected at most so many"
