"""What OpenAI-compatible clients send, as far as Quire serves it. Fields that vLLM added are known by vLLM's names.

Ranges are not checked here: `validate.py` checks every request, whichever way it came. Fields that would change the
answer and are not offered are refused by name; other unknown fields are ignored, as clients send many.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
# What protobuf's float can hold; validate.py has the real ranges.
Float32 = Annotated[float, Field(ge=-3.4e38, le=3.4e38)]


class StreamOptions(BaseModel):
    """How a stream ends."""

    include_usage: bool = False


class GenerationFields(BaseModel):
    """What both kinds of request have."""

    model_config = ConfigDict(extra="allow")

    # Fields whose presence, other than as one of these values, asks for what is not offered.
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {
        "guided_json": (),
        "guided_regex": (),
        "guided_grammar": (),
        "structured_outputs": (),
        "prompt_logprobs": (),
        "use_beam_search": (False,),
    }

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Float32 | None = None
    top_p: Float32 | None = None
    n: Int32 | None = None
    stop: str | list[str] | None = None
    seed: Int64 | None = None
    presence_penalty: Float32 | None = None
    frequency_penalty: Float32 | None = None
    logit_bias: dict[Int32, Float32] | None = None
    top_k: Int32 | None = None
    min_p: Float32 | None = None
    min_tokens: Int32 | None = None
    repetition_penalty: Float32 | None = None
    stop_token_ids: list[Int32] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Int32 = 0
    cache_salt: str = ""
    return_token_ids: bool = False

    @property
    def unsupported(self) -> list[str]:
        """Names of the fields that ask for what is not offered."""
        given = self.model_extra or {}
        return [
            name for name, harmless in self.refused.items() if given.get(name) and given[name] not in harmless
        ]  # fmt: skip

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with what it cost."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationFields):
    """Body of POST /v1/completions. A list of prompts is answered by `n` choices for each, in order."""

    refused: ClassVar[dict[str, tuple[Any, ...]]] = GenerationFields.refused | {
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
    }

    prompt: str | list[Int32] | list[str] | list[list[Int32]]
    max_tokens: Int32 | None = 16
    logprobs: Int32 | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one or many, as texts or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]


class TextPart(BaseModel):
    """One part of a message; only text is served."""

    type: str
    text: str = ""


class Message(BaseModel):
    """One message of a chat."""

    role: str
    content: str | list[TextPart] | None = None

    @property
    def text(self) -> str:
        """The content as one string."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


class ResponseFormat(BaseModel):
    """What form the answer must have."""

    type: str = "text"
    json_schema: dict[str, Any] | None = None


class ChatRequest(GenerationFields):
    """Body of POST /v1/chat/completions."""

    refused: ClassVar[dict[str, tuple[Any, ...]]] = GenerationFields.refused | {
        "tools": (),
        "functions": (),
        "audio": (),
        "modalities": (["text"],),
        "continue_final_message": (False,),
    }

    messages: list[Message]
    max_completion_tokens: Int32 | None = None
    max_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    response_format: ResponseFormat | None = None
