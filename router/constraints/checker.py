"""Checks constraints before a request is queued: compiles them and computes their first mask.

A hostile constraint can use up processor time, memory or the stack. A child process (`router/constraints/examiner.py`)
therefore does the work, so that a crash costs one verdict. Sizes are bounded. Verdicts are cached, because clients send
the same schema many times.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from common.errors import FieldViolation, InvalidRequest, Overloaded, QuotaViolation, Unsupported
from common.process.python import module_command
from common.types import Constraint

MAX_BYTES = 64 * 1024
MAX_WAITING = 64
_MAX_VERDICTS = 512
_RETRY_S = 1.0


class ConstraintChecker:
    """Checks whether constraints can be enforced with a checkpoint's tokenizer.json; for one event loop."""

    def __init__(self, tokenizer_json: Path, eos_token_ids: tuple[int, ...] = ()) -> None:
        """The child process starts, and reads the tokenizer, at the first constraint."""
        self._path, self._eos = tokenizer_json, eos_token_ids
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="constraints")
        self._child: subprocess.Popen[str] | None = None
        # Why a constraint is wrong, by its digest; "" for a valid one.
        self._verdicts: OrderedDict[bytes, asyncio.Future[str]] = OrderedDict()

    @classmethod
    def load(cls, directory: Path, eos_token_ids: tuple[int, ...]) -> ConstraintChecker | None:
        """Return the checker of a checkpoint; None where it has no tokenizer.json."""
        path = directory / "tokenizer.json"
        return cls(path, eos_token_ids) if path.is_file() else None

    async def check(self, constraint: Constraint) -> None:
        """Raise InvalidRequest for a wrong constraint, Unsupported if none can be enforced here, or Overloaded."""
        wrong = _size(constraint) or await asyncio.shield(self._verdict(constraint))
        if wrong:
            raise InvalidRequest(FieldViolation(constraint.kind.value, wrong))

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()  # wakes the thread that waits for it
        self._thread.shutdown(cancel_futures=True)
        if self._child is not None:
            _end(self._child)

    def _verdict(self, constraint: Constraint) -> asyncio.Future[str]:
        """Return the finished or pending verdict; concurrent checks of one constraint share it."""
        digest = hashlib.sha256(f"{constraint.kind.value} {constraint.text}".encode()).digest()
        verdict = self._verdicts.get(digest)
        if verdict is None:
            self._refuse_if_busy()
            verdict = asyncio.get_running_loop().run_in_executor(self._thread, self._examine, constraint)
            self._verdicts[digest] = verdict
        self._verdicts.move_to_end(digest)
        if len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    def _refuse_if_busy(self) -> None:
        """Raise Overloaded when too many constraints wait."""
        waiting = sum(not verdict.done() for verdict in self._verdicts.values())
        if waiting >= MAX_WAITING:
            what = f"{waiting} of {MAX_WAITING} constraints wait to be examined"
            raise Overloaded(QuotaViolation("router.constraints.checker", what), _RETRY_S)

    def _examine(self, constraint: Constraint) -> str:
        """Ask the child process, on the thread; a child that dies refuses the constraint."""
        child = self._child = self._living_child()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps([constraint.kind.value, constraint.text]) + "\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            if (status := child.wait()) > 0:  # below 0: a constraint that costs too much ends the process by a signal
                raise Unsupported(f"constraints cannot be examined here: llguidance failed with status {status}")
            return "is too complex to be followed; make it smaller"
        unsupported, wrong = json.loads(answer)
        if unsupported:
            raise Unsupported(unsupported)
        return str(wrong)

    def _living_child(self) -> subprocess.Popen[str]:
        if self._child is not None:
            if self._child.poll() is None:
                return self._child
            _end(self._child)
        command = module_command("router.constraints.examiner", str(self._path.resolve()), *map(str, self._eos))
        pipe = subprocess.PIPE
        # Discarded: the error output of llguidance may quote the constraint.
        stderr = subprocess.DEVNULL
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, text=True)


def _end(child: subprocess.Popen[str]) -> None:
    child.kill()
    with suppress(BrokenPipeError), child:  # closes the pipes, perhaps with an unread request, and waits
        pass


def _size(constraint: Constraint) -> str:
    size = len(constraint.text.encode())
    return f"has {size} bytes; expected at most {MAX_BYTES}" if size > MAX_BYTES else ""
