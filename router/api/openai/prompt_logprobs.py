"""Log-probabilities of a prompt in the answers of this API: in the lists of an echoed prompt, and in vLLM's form.

vLLM's form is a list with an entry a token, null for the first one: {ID: {"logprob": ..., "rank": ..., "decoded_token":
...}, ...}, with the prompt's own token first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from common.contracts.types import TokenLogprobs
from router.api.openai.logprobs import ChoiceLogprobs, Columns, number, token_json
from router.contracts.ports import TextCodec

# Bytes of an entry of vLLM's form at least.
LEAST_RANKED_BYTES: Final = 44


@dataclass(frozen=True, slots=True)
class WantedLogprobs:
    """How many likely tokens the echoed prompt shows at each place, and vLLM's form; None for neither."""

    echoed: int | None = None
    ranked: int | None = None


NO_LOGPROBS: Final = WantedLogprobs()


class PromptEncoder:
    """Encodes the log-probabilities of one prompt, piece by piece, for all its choices."""

    def __init__(self, codec: TextCodec, wanted: WantedLogprobs, as_ids: bool) -> None:
        self._codec, self._wanted = codec, wanted
        self._echo = ChoiceLogprobs(codec, chat=False, as_ids=as_ids, begins=True)

    def first(self, token_id: int) -> Columns:
        """Return the lists of the first token, which has no log-probability, without their brackets."""
        return {} if self._wanted.echoed is None else self._echo.first(token_id)

    def columns(self, entries: Sequence[TokenLogprobs]) -> Columns:
        """Return the lists of the next tokens."""
        if self._wanted.echoed is None or not entries:
            return {}
        return self._echo.columns([_of_best(entry, self._wanted.echoed) for entry in entries])

    def ranked(self, entries: Sequence[TokenLogprobs]) -> str:
        """Return the next entries of vLLM's form."""
        count = self._wanted.ranked
        return "" if count is None else ",".join([self._entry(_of_best(entry, count)) for entry in entries])

    def _entry(self, entry: TokenLogprobs) -> str:
        found = {entry.token_id: (entry.logprob, entry.rank)}
        for rank, (token_id, logprob) in enumerate(entry.top, 1):
            found.setdefault(token_id, (logprob, rank))
        return "{" + ",".join([self._member(token_id, *each) for token_id, each in found.items()]) + "}"

    def _member(self, token_id: int, logprob: float, rank: int) -> str:
        text = token_json(self._codec, token_id)
        return f'"{token_id}":{{"logprob":{number(logprob)},"rank":{rank},"decoded_token":{text}}}'


def _of_best(entry: TokenLogprobs, count: int) -> TokenLogprobs:
    return entry if len(entry.top) <= count else replace(entry, top=entry.top[:count])
