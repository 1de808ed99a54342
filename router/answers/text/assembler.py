"""The text of one sequence's output: from tokens, and up to its stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from common.contracts.types import SamplingParams
from router.answers.dialects.stop_words import StopWords
from router.answers.stop_matcher import StopMatcher
from router.answers.text.detokenizer import Detokenizer
from router.contracts.answer_parts import Parser
from router.contracts.ports import TextDelta


# Text of one sequence's output: whole characters, and stop strings that may span tokens.
# Text that may still become a stop string is held back. The stop string that completes first ends the output; of
# two that end at one character, the longer. So the result does not depend on how tokens divide the text.
class OutputText:
    """The TextAssembler of one sequence. A stop counts only when the output has `min_tokens` tokens at its end."""

    def __init__(self, detokenizer: Detokenizer, sampling: SamplingParams) -> None:
        self._detokenizer = detokenizer
        self._matchers = [StopMatcher(stop) for stop in sampling.stop]
        self._min_tokens = sampling.min_tokens
        self._include_stop = sampling.include_stop
        self._tokens = 0
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        if not self._matchers:
            return TextDelta(self._detokenizer.push(token_ids), len(token_ids))
        sent = []
        for taken, token_id in enumerate(token_ids, start=1):
            self._tokens += 1
            delta = self._append(self._detokenizer.push([token_id]), taken)
            sent.append(delta.text)
            if delta.stop_string is not None:
                return TextDelta("".join(sent), taken, delta.stop_string)
        return TextDelta("".join(sent), len(token_ids))

    def finish(self) -> str:
        """Return the text that was held back; it did not become a stop string."""
        held, self._held = self._held, ""
        return held + self._detokenizer.finish()

    def _append(self, text: str, taken: int) -> TextDelta:
        self._held += text
        start = len(self._held) - len(text)
        for end, character in enumerate(text, start=start + 1):
            # Every matcher must see every character.
            complete = [matcher.stop for matcher in self._matchers if matcher.step(character)]
            if complete and self._tokens >= self._min_tokens:
                return self._stop(max(complete, key=len), end, taken)
        return TextDelta(self._release(max(matcher.matched for matcher in self._matchers)), taken)

    def _stop(self, stop: str, end: int, taken: int) -> TextDelta:
        text = self._held[: end if self._include_stop else end - len(stop)]
        self._held = ""
        return TextDelta(text, taken, stop)

    def _release(self, keep: int) -> str:
        """Return the held text but for its last `keep` characters."""
        end = len(self._held) - keep
        text, self._held = self._held[:end], self._held[end:]
        return text


class AnswerText:
    """The TextAssembler of a sequence whose stop strings concern the words of its answer alone.

    Its text is that of all tokens up to the stop. Who reads the answer leaves out the stop string, as `StopWords` does.
    """

    def __init__(self, detokenizer: Detokenizer, sampling: SamplingParams, parser: Parser) -> None:
        self._detokenizer, self._words = detokenizer, StopWords(parser, sampling.stop)
        self._min_tokens, self._tokens = sampling.min_tokens, 0

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        sent = list[str]()
        for taken, token_id in enumerate(token_ids, start=1):
            self._tokens += 1
            text = self._detokenizer.push([token_id])
            for end, character in enumerate(text, start=1):
                self._words.feed(character)
                if (stop := self._words.complete) is not None and self._tokens >= self._min_tokens:
                    return TextDelta("".join(sent) + text[:end], taken, stop)
            sent.append(text)
        return TextDelta("".join(sent), len(token_ids))

    def finish(self) -> str:
        """Return the text that was held back: a character that never completed."""
        return self._detokenizer.finish()


class NoText:
    """The TextAssembler where the checkpoint has no tokenizer: tokens without text."""

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take tokens, which all belong to the output."""
        return TextDelta("", len(token_ids))

    def finish(self) -> str:
        return ""
