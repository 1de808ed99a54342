"""Errors of a stream that broke after its first event. They extend the tree of quire/api/errors.py.

QuireError
└── Interrupted                 the stream broke after its first event; carries the output so far
    └── InterruptedByDeadline   the deadline passed: a DeadlineExceeded too
"""

from __future__ import annotations

from quire.api.errors import DeadlineExceeded, QuireError
from quire.client.results import Completion


class Interrupted(QuireError):
    """A stream broke after its first event, and no router could go on with it. It does not begin anew by itself.

    `partial` is the output so far, which the caller may have used. `meant` is the error of the server or of gRPC that
    ended the stream. To go on, send the prompt's tokens and `partial.token_ids` as a new prompt.
    """

    reason = "INTERRUPTED"

    def __init__(self, meant: QuireError, partial: Completion) -> None:
        tokens = sum(len(output.token_ids) for output in partial.outputs)
        super().__init__(f"{meant} (after {tokens} output tokens; trace {partial.trace_id or 'unknown'})")
        self.meant, self.partial = meant, partial


class InterruptedByDeadline(Interrupted, DeadlineExceeded):
    """The deadline passed while outputs were generated."""

    reason = "DEADLINE_EXCEEDED"


def interrupted(meant: QuireError, partial: Completion) -> Interrupted:
    kind = InterruptedByDeadline if isinstance(meant, DeadlineExceeded) else Interrupted
    return kind(meant, partial)
