"""A whole answer of the OpenAI-compatible API: collects pieces by choice, then returns one body."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.types import TokenLogprobs
from router.openai.answer import Answer, Json, Piece
from router.openai.logprobs import ChoiceLogprobs


@dataclass(slots=True)
class _Choice:
    texts: list[str]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class WholeAnswer:
    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._choices = [_Choice([choice.text]) for choice in answer.form.choices(answer.prompts)]

    def add(self, piece: Piece) -> None:
        choice = self._choices[piece.index]
        choice.texts.append(piece.text)
        choice.token_ids += piece.token_ids
        choice.logprobs += piece.logprobs
        if piece.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason

    def body(self) -> Json:
        kind = "chat.completion" if self._answer.form.chat else "text_completion"
        choices = list(map(self._choice, range(len(self._choices)), self._choices, self._answer.new_logprobs()))
        return self._answer.head(kind) | {"choices": choices, "usage": self._answer.bill.body()}

    def _choice(self, index: int, choice: _Choice, logprobs: ChoiceLogprobs) -> Json:
        text = "".join(choice.texts)
        message = {"role": "assistant", "content": text, "refusal": None}
        body = {
            "index": index,
            **({"message": message} if self._answer.form.chat else {"text": text}),
            "logprobs": logprobs.body(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        return body | {"token_ids": choice.token_ids} if self._answer.form.return_token_ids else body
