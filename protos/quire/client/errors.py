"""What can become of a stream that had begun: the tree of quire/api/errors.py goes on here.

QuireError
└── Interrupted                 the stream broke after it had begun; carries what had come
    └── InterruptedByDeadline   so it did because the deadline passed: a DeadlineExceeded too
"""

from __future__ import annotations

from quire.api.errors import DeadlineExceeded, QuireError
from quire.client.results import Completion


class Interrupted(QuireError):
    """A stream broke after its first event. It is not begun again: the caller may have used its tokens.

    `partial` is what had come; `meant` is the error that the server, or gRPC, ended the stream with. To go on, ask
    again with the prompt's tokens and `partial.token_ids` as the prompt.
    """

    reason = "INTERRUPTED"

    def __init__(self, meant: QuireError, partial: Completion) -> None:
        tokens = sum(len(output.token_ids) for output in partial.outputs)
        super().__init__(f"{meant} (after {tokens} output tokens; trace {partial.trace_id or 'unknown'})")
        self.meant, self.partial = meant, partial


class InterruptedByDeadline(Interrupted, DeadlineExceeded):
    """The deadline passed while the outputs were being made."""

    reason = "DEADLINE_EXCEEDED"


def interrupted(meant: QuireError, partial: Completion) -> Interrupted:
    """Return the error of a stream that broke."""
    kind = InterruptedByDeadline if isinstance(meant, DeadlineExceeded) else Interrupted
    return kind(meant, partial)
