"""Reads requests of SMG's gateway to a vLLM engine, and encodes the router's events as the answers it expects.

The gateway makes tokens of texts and texts of tokens by itself, and fills in the checkpoint's defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from common.contracts.errors import EngineFailure, InvalidRequest
from common.contracts.types import Constraint, ConstraintKind, FinishReason, TokenLogprobs
from quire.vllm.v1 import engine_pb2 as pb
from router.answers.reading import AskedConstraint
from router.api.shared.constraints import ANY_OBJECT, choice_of
from router.api.shared.field_names import FieldNames
from router.api.vllm.fields import Asked, Reader, unknown_fields, wrong_rank
from router.contracts.events import Admitted, Finished, GenerateEvent, PromptLogprobs, Tokens, ValidatedRequest

SPOKEN: Final = "smg-grpc-proto 0.4.28"
# Bytes of a token in an answer at least, and of a log-probability with its token.
LEAST_TOKEN_BYTES: Final = 1
LEAST_ENTRY_BYTES: Final = 5

_NAMES: Final = (
    (r"^prompt\.token_ids\.ids", "tokenized.input_ids"),
    (r"^prompt\.text", "text"),
    (r"^input$", "input"),
    (r"^sampling\.include_stop", "sampling_params.include_stop_str_in_output"),
    (r"^sampling\.", "sampling_params."),
    (r"^truncate_prompt_tokens", "sampling_params.truncate_prompt_tokens"),
)
_MEDIA: Final = "the model takes text alone; send no media"
_TRANSFER: Final = "blocks move between Quire's workers by its own means; register the suite as a worker that does all"
_NOT_OFFERED: Final = {
    "kv_transfer_params": _TRANSFER,
    "kv_transfer_params_json": _TRANSFER,
    "mm_inputs": _MEDIA,
    "extra_mm_inputs": _MEDIA,
    "media_refs": _MEDIA,
}
_NO_TAGS: Final = {
    "structural_tag": "structural tags are not compiled here; give the same as a grammar in Lark's notation"
}
_SAME: Final = ("min_p", "frequency_penalty", "presence_penalty", "ignore_eos")
_WHERE_GIVEN: Final = ("logprobs", "prompt_logprobs", "seed")


def read(request: pb.GenerateRequest) -> Asked:
    """Return the gateway's request. Never raises."""
    reader, given = Reader(), request.sampling_params
    reader.refuse_given(request, "", _NOT_OFFERED)
    # What stands within a field that is refused does not matter.
    reader.wrong = reader.wrong or [*unknown_fields(request, SPOKEN)]
    if request.data_parallel_rank:
        reader.refuse("data_parallel_rank", wrong_rank(request.data_parallel_rank))
    generate, sampling = reader.generate, reader.generate.sampling
    generate.request_id = request.request_id
    if request.HasField("tokenized"):
        generate.prompt.token_ids.ids.extend(reader.ids("tokenized.input_ids", request.tokenized.input_ids))
    elif request.HasField("text"):
        generate.prompt.text = request.text
    # Where the gateway gives none, this protocol has values of its own, not those of the checkpoint.
    sampling.temperature = given.temperature if given.HasField("temperature") else 1.0
    sampling.top_p, sampling.repetition_penalty = given.top_p or 1.0, given.repetition_penalty or 1.0
    sampling.top_k = reader.small("sampling_params.top_k", given.top_k) or 0
    sampling.n = reader.small("sampling_params.n", given.n) or 1
    sampling.min_tokens = reader.small("sampling_params.min_tokens", given.min_tokens) or 0
    for name in _SAME:
        setattr(sampling, name, getattr(given, name))
    for name in _WHERE_GIVEN:
        if given.HasField(name):  # type: ignore[arg-type]
            setattr(sampling, name, getattr(given, name))
    if (
        given.HasField("max_tokens")
        and (most := reader.small("sampling_params.max_tokens", given.max_tokens)) is not None
    ):
        sampling.max_tokens = most
    if given.HasField("truncate_prompt_tokens"):
        generate.truncate_prompt_tokens = given.truncate_prompt_tokens
    sampling.stop.extend(given.stop)
    sampling.stop_token_ids.extend(reader.ids("sampling_params.stop_token_ids", given.stop_token_ids))
    sampling.include_stop = given.include_stop_str_in_output
    generate.skip_special_tokens = given.skip_special_tokens
    reader.biases("sampling_params.logit_bias", given.logit_bias)
    names = _read_constraint(reader, given)
    kinds = [(f"^{kind}", path) for kind, path in names.items()]
    prompt = (r"^prompt$", "text" if request.HasField("text") else "tokenized.input_ids")
    return Asked(generate, tuple(reader.wrong), FieldNames(*kinds, prompt, *_NAMES))


def _read_constraint(reader: Reader, given: pb.SamplingParams) -> dict[str, str]:
    """Set the constraint; return the client's name of each field of Quire's that it sets."""
    reader.refuse_given(given, "sampling_params.", _NO_TAGS)
    found = given.WhichOneof("constraint") or ""
    path = f"sampling_params.{found}"
    match found:
        case "json_schema" | "regex" | "grammar":
            asked = AskedConstraint(path, Constraint(ConstraintKind(found), getattr(given, found)))
        case "json_object" if given.json_object:
            asked = AskedConstraint(path, ANY_OBJECT)
        case "choice":
            try:
                asked = AskedConstraint(path, choice_of(given.choice.choices, f"{path}.choices"))
            except InvalidRequest as error:
                reader.wrong += error.violations
                return {}
        case _:
            return {}
    return reader.constrain(asked)


class Answer:
    """The answers to one request, streamed or not. `grow` is called with the bytes that an event adds at least."""

    def __init__(
        self,
        request: pb.GenerateRequest,
        validated: ValidatedRequest,
        grow: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._streams, self._prompt, self._grow = request.stream, validated.prompt, grow
        self._stops = frozenset(request.sampling_params.stop_token_ids)
        # The ends of sequences that are not streamed, as they grow.
        self._ends = [pb.GenerateComplete(index=index) for index in range(validated.sampling.n)]
        self._scored: list[TokenLogprobs] = []
        self._cached = 0

    def responses(self, event: GenerateEvent) -> Iterator[pb.GenerateResponse]:
        """Yield what an event adds. Raises EngineFailure for an output that ended in an error."""
        match event:
            case Admitted():
                self._cached = event.cached_tokens
            case PromptLogprobs():
                self._grow(LEAST_ENTRY_BYTES * sum(1 + len(each.top) for each in event.logprobs))
                self._scored += event.logprobs
            case Tokens():
                self._grow(len(event.token_ids) + LEAST_ENTRY_BYTES * sum(1 + len(each.top) for each in event.logprobs))
                if self._streams and event.token_ids:
                    yield pb.GenerateResponse(chunk=self._chunk(event))
                elif not self._streams:
                    self._ends[event.index].output_ids.extend(event.token_ids)
                    _add_logprobs(self._ends[event.index], event)
            case Finished(reason=FinishReason.ERROR):
                raise EngineFailure(event.message or "the worker ended the output with an error; try again")
            case Finished():
                yield pb.GenerateResponse(complete=self._complete(event))

    def _chunk(self, event: Tokens) -> pb.GenerateStreamChunk:
        chunk = pb.GenerateStreamChunk(
            token_ids=event.token_ids,
            prompt_tokens=len(self._prompt),
            completion_tokens=len(event.token_ids),
            cached_tokens=self._cached,
            index=event.index,
        )
        _add_logprobs(chunk, event)
        if self._scored and not event.index:
            chunk.input_logprobs.CopyFrom(self._input())
            self._scored = []
        return chunk

    def _complete(self, event: Finished) -> pb.GenerateComplete:
        """Return the end of a sequence, with its output unless that was streamed."""
        complete = self._ends[event.index]
        complete.finish_reason = _REASONS.get(event.reason, "abort")
        complete.prompt_tokens = len(self._prompt)
        complete.completion_tokens = event.usage.output_tokens
        complete.cached_tokens = event.usage.cached_tokens
        complete.spec_accepted_tokens = event.usage.accepted_draft_tokens
        complete.spec_draft_tokens = event.usage.drafted_tokens
        if self._scored and not event.index:
            complete.input_logprobs.CopyFrom(self._input())
        if event.stop_string is not None:
            complete.matched_stop_str = event.stop_string
        elif event.stop_token_id in self._stops:
            complete.matched_token_id = event.stop_token_id
        return complete

    def _input(self) -> pb.InputLogProbs:
        """Return the log-probabilities of the prompt, whose first token has none."""
        found = pb.InputLogProbs(token_ids=self._prompt)
        found.token_logprobs.add()
        with_top = any(each.top for each in self._scored)
        if with_top:
            found.top_logprobs.add()
        for entry in self._scored:
            found.token_logprobs.add(value=entry.logprob)
            if with_top:
                found.top_logprobs.append(_top(entry))
        return found


_REASONS: Final = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


def _add_logprobs(message: pb.GenerateStreamChunk | pb.GenerateComplete, event: Tokens) -> None:
    for entry in event.logprobs:
        message.output_logprobs.token_logprobs.append(entry.logprob)
        message.output_logprobs.token_ids.append(entry.token_id)
        if entry.top:
            message.output_logprobs.top_logprobs.append(_top(entry))


def _top(entry: TokenLogprobs) -> pb.TopLogProbs:
    return pb.TopLogProbs(values=[value for _, value in entry.top], token_ids=[token_id for token_id, _ in entry.top])
