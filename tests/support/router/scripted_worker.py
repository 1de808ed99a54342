"""A worker whose model says what a test wrote down: a model double behind the real router, over real gRPC."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from cli.demo_model import CHECKPOINT
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.types.v1 import types_pb2
from router.answers.text.checkpoint import read_checkpoint
from tests.support.router.fake_worker import FakeWorker, prompt_of

FACTS = read_checkpoint(CHECKPOINT)
# What comes for a prompt that no text was written down for; tests count the prompts.
NOTHING_LEFT = "(the script is over)"


@dataclass
class ScriptedWorker(FakeWorker):
    """Answers each sequence with the next text of its script, token by token, and keeps the prompts that it got."""

    num_blocks: int = 4096
    max_model_len: int = FACTS.max_model_len
    automatic: bool = True
    script: deque[str] = field(default_factory=deque)
    prompts: list[str] = field(default_factory=list)
    # What comes for a prompt with such words: a client asks for a title, say, while it asks for the first text.
    asides: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))

    def run(self, submit: pb.Submit) -> None:
        """Say the next text, then the token that ends an answer."""
        prompt = prompt_of(submit)
        text = self._answer_to(self._tokenizer.decode(prompt, skip_special_tokens=False))
        last = FACTS.eos_token_ids[0]
        ids = [*self._tokenizer.encode(text, add_special_tokens=False).ids, last]
        self.step(admitted={submit.handle: 0})
        for token in ids[:-1]:
            self.step({submit.handle: [token]})
        usage = types_pb2.Usage(prompt_tokens=len(prompt), output_tokens=len(ids))
        reason = types_pb2.FINISH_REASON_STOP
        ended = pb.SequenceFinished(handle=submit.handle, reason=reason, usage=usage, stop_token_id=last)
        self.step({submit.handle: [last]}, ended=[ended])

    def _answer_to(self, prompt: str) -> str:
        for words, aside in self.asides.items():
            if words in prompt:
                return aside
        self.prompts.append(prompt)
        return self.script.popleft() if self.script else NOTHING_LEFT
