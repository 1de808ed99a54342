"""What a benchmark sends: requests of token ids, all at once, and the next turns of conversations."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and the number of tokens that follow it. Requests outside a conversation have `conversation` -1."""

    rid: str
    prompt: list[int]
    max_new_tokens: int
    conversation: int = -1
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are submitted all at once, and their follow-ups. `user_turns` is by (conversation, turn)."""

    name: str
    initial: list[Request]
    turns: int = 1
    user_turns: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def follow_up(self, request: Request, output: Sequence[int]) -> Request | None:
        """Return the next turn of a conversation: its whole history, and the user's next words."""
        turn = request.turn + 1
        if request.conversation < 0 or turn >= self.turns:
            return None
        prompt = [*request.prompt, *output, *self.user_turns[request.conversation, turn]]
        name = f"c{request.conversation:02d}t{turn}"
        return Request(name, prompt, request.max_new_tokens, request.conversation, turn)

    @property
    def num_requests(self) -> int:
        """Requests in all, follow-ups included."""
        return len(self.initial) * self.turns

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits of every token id and length."""
        requests = repr([(each.rid, each.prompt, each.max_new_tokens) for each in self.initial])
        return hashlib.sha256((requests + repr(sorted(self.user_turns.items()))).encode()).hexdigest()[:12]


def equal_requests(count: int, prompt: int, output: int, seed: int, vocabulary: int = 32000) -> Workload:
    """Return requests of equal lengths that share nothing."""
    rng = random.Random(f"equal/{seed}")
    least = min(3, vocabulary - 1)  # after padding, beginning and end of a sequence
    prompts = ([rng.randrange(least, vocabulary) for _ in range(prompt)] for _ in range(count))
    return Workload("equal", [Request(str(index), each, output) for index, each in enumerate(prompts)])
