"""Reads requests of vLLM's own `Inference` service, and encodes the router's events as its responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from common.contracts.errors import EngineFailure, InvalidRequest
from common.contracts.limits import MAX_LOGPROBS, MAX_PRIORITY
from common.contracts.types import Constraint, ConstraintKind, FinishReason, TokenLogprobs
from quire.vllm.v1 import inference_pb2 as pb
from router.answers.reading import AskedConstraint
from router.api.shared.constraints import ANY_OBJECT, choice_of
from router.api.shared.field_names import FieldNames
from router.api.vllm.fields import Asked, Reader, unknown_fields
from router.contracts.events import Finished, GenerateEvent, PromptLogprobs, Tokens, ValidatedRequest
from router.contracts.ports import ModelCard

SPOKEN: Final = "vLLM 0.33.0"
SCHEMA_VERSION: Final = "0.6.0"
"""The version of the .proto files that the service follows, as vLLM counts them."""
# Bytes of a log-probability with its rank in a response at least, and of another token with both.
LEAST_ENTRY_BYTES: Final = 5

_NAMES: Final = (
    (r"^prompt\.(token_ids\.ids|text)", r"\1"),
    (r"^input$", "prompt"),
    (r"^sampling\.temperature", "temperature"),
    (r"^sampling\.n$", "sampling.num_sequences"),
    (r"^sampling\.(presence|frequency|repetition)_penalty", r"decoding.\1_penalty"),
    (r"^sampling\.logit_bias", "decoding.logit_bias"),
    (r"^sampling\.(max|min)_tokens", r"stopping.\1_new_tokens"),
    (r"^sampling\.stop_token_ids", "stopping.stop_token_ids"),
    (r"^sampling\.stop\b", "stopping.stop_strings"),
    (r"^sampling\.prompt_logprobs", "response.prompt_candidates.top_n"),
    (r"^sampling\.logprobs", "response.output_candidates.top_n"),
    (r"^sampling\.logprob_token_ids", "response.output_candidates.token_ids.ids"),
    (r"^cache\.salt", "kv.cache_salt"),
)
_TEXT_ALONE: Final = "the model takes text alone; leave it out"
_OWN_MEANS: Final = "blocks move between Quire's workers by its own means; leave it out"
_NOT_OFFERED: Final = {"media": _TEXT_ALONE}
_NOT_OF_KV: Final = {"kv_transfer_params": _OWN_MEANS, "ec_transfer_params": _OWN_MEANS}
_NOT_OF_DECODING: Final = {
    "structural_tag": "structural tags are not compiled here; give the same as a grammar in Lark's notation",
    "bad_words_token_ids": "sequences of tokens cannot be forbidden; forbid single tokens by logit_bias of -100",
}
_ALL: Final = f"is given, and at most {MAX_LOGPROBS} tokens come; give top_n"


def read(request: pb.GenerateRequest, card: ModelCard, streaming: bool) -> Asked:
    """Return the client's request; `streaming` means that the answer comes in parts. Never raises."""
    reader = Reader()
    reader.refuse_given(request, "", _NOT_OFFERED)
    # What stands within a field that is refused does not matter.
    reader.wrong = reader.wrong or [*unknown_fields(request, SPOKEN)]
    generate, sampling = reader.generate, reader.generate.sampling
    generate.request_id = request.request_id
    if request.HasField("text"):
        generate.prompt.text = request.text
    elif request.HasField("token_ids"):
        generate.prompt.token_ids.ids.extend(reader.ids("token_ids.ids", request.token_ids.ids))
    sampling.temperature = request.temperature if request.HasField("temperature") else 0.0
    if request.truncate_prompt_tokens:
        most = reader.small("truncate_prompt_tokens", request.truncate_prompt_tokens)
        generate.truncate_prompt_tokens = most or 1
    if -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
        generate.priority = -request.priority
    else:
        what = f"is {request.priority}; expected -{MAX_PRIORITY}, which is served first, to {MAX_PRIORITY}"
        reader.refuse("priority", what)
    gate = request.engine_reasoning_gate
    if gate.HasField("reasoning_ended") and not gate.reasoning_ended:
        what = "is false, and constraints hold from the first token here; give one that covers the thought too"
        reader.refuse("engine_reasoning_gate.reasoning_ended", what)
    _read_sampling(reader, request.sampling, streaming)
    _read_stopping(reader, request.stopping)
    _read_response(reader, request)
    _read_kv(reader, request.kv)
    names = _read_decoding(reader, request.decoding, card)
    kinds = [(f"^{kind}", path) for kind, path in names.items()]
    prompt = (r"^prompt$", "text" if request.HasField("text") else "token_ids.ids")
    return Asked(generate, tuple(reader.wrong), FieldNames(*_NAMES[:1], prompt, *_NAMES[1:], *kinds))


def _read_sampling(reader: Reader, given: pb.RandomSampling, streaming: bool) -> None:
    sampling = reader.generate.sampling
    sampling.n = reader.small("sampling.num_sequences", given.num_sequences) or 1
    if sampling.n > 1 and not streaming:
        what = f"is {sampling.n}, and Generate answers with one sequence; call GenerateStream"
        reader.refuse("sampling.num_sequences", what)
    if given.HasField("top_k"):
        sampling.top_k = reader.small("sampling.top_k", given.top_k) or 0
    for name in ("top_p", "min_p", "seed"):
        if given.HasField(name):
            setattr(sampling, name, getattr(given, name))


def _read_decoding(reader: Reader, given: pb.DecodingParameters, card: ModelCard) -> dict[str, str]:
    """Read penalties and constraint; return the client's name of each field of Quire's that the constraint sets."""
    reader.refuse_given(given, "decoding.", _NOT_OF_DECODING)
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        if value := getattr(given, name):
            setattr(reader.generate.sampling, name, value)
    reader.biases("decoding.logit_bias", given.logit_bias)
    found = given.WhichOneof("structured_output")
    asked = None if found is None else _constraint(reader, given, found)
    if given.allowed_token_ids and asked is not None:
        reader.refuse("decoding.allowed_token_ids", f"cannot be combined with {asked.field}; omit one of them")
    elif given.allowed_token_ids:
        path = "decoding.allowed_token_ids"
        return reader.allow(path, reader.ids(path, given.allowed_token_ids), card)
    return {} if asked is None else reader.constrain(asked)


def _constraint(reader: Reader, given: pb.DecodingParameters, found: str) -> AskedConstraint | None:
    path = f"decoding.{found}"
    match found:
        case "json":
            return AskedConstraint(path, Constraint(ConstraintKind.JSON_SCHEMA, given.json))
        case "regex" | "grammar":
            return AskedConstraint(path, Constraint(ConstraintKind(found), getattr(given, found)))
        case "json_object" if given.json_object:
            return AskedConstraint(path, ANY_OBJECT)
        case "choice":
            try:
                return AskedConstraint(path, choice_of(given.choice.choices, f"{path}.choices"))
            except InvalidRequest as error:
                reader.wrong += error.violations
    return None


def _read_stopping(reader: Reader, given: pb.StoppingCriteria) -> None:
    sampling = reader.generate.sampling
    if given.max_new_tokens and (most := reader.small("stopping.max_new_tokens", given.max_new_tokens)) is not None:
        sampling.max_tokens = most
    sampling.min_tokens = reader.small("stopping.min_new_tokens", given.min_new_tokens) or 0
    sampling.stop_token_ids.extend(reader.ids("stopping.stop_token_ids", given.stop_token_ids))
    sampling.stop.extend(given.stop_strings)
    sampling.include_stop = given.include_stop_strings
    sampling.ignore_eos = given.ignore_eos
    if given.HasField("thinking_token_budget") and given.thinking_token_budget != -1:
        what = f"is {given.thinking_token_budget}, and this API does not know the marks of a thought"
        reader.refuse("stopping.thinking_token_budget", f"{what}; use thought_budget of Quire's own API, or give -1")


def _read_response(reader: Reader, request: pb.GenerateRequest) -> None:
    given, sampling = request.response, reader.generate.sampling
    if given.HasField("skip_special_tokens"):
        reader.generate.skip_special_tokens = given.skip_special_tokens
    if given.output_logprobs:
        match given.output_candidates.WhichOneof("select"):
            case "token_ids" if given.output_candidates.token_ids.ids:
                ids = given.output_candidates.token_ids.ids
                sampling.logprobs = 0
                sampling.logprob_token_ids.extend(reader.ids("response.output_candidates.token_ids.ids", ids))
            case "all" if given.output_candidates.all:
                reader.refuse("response.output_candidates.all", _ALL)
            case _:
                top = reader.small("response.output_candidates.top_n", given.output_candidates.top_n)
                sampling.logprobs = top or 0
    if given.prompt_logprobs:
        match given.prompt_candidates.WhichOneof("select"):
            case "token_ids":
                what = "is given, and candidates of a prompt are the likeliest ones; give top_n"
                reader.refuse("response.prompt_candidates.token_ids", what)
            case "all" if given.prompt_candidates.all:
                reader.refuse("response.prompt_candidates.all", _ALL)
            case _:
                top = reader.small("response.prompt_candidates.top_n", given.prompt_candidates.top_n)
                sampling.prompt_logprobs = top or 0
        if sampling.n > 1:
            what = "is true, and stands in the first response, before any of several sequences; ask for one sequence"
            reader.refuse("response.prompt_logprobs", what)


def _read_kv(reader: Reader, given: pb.KVCacheParameters) -> None:
    reader.refuse_given(given, "kv.", _NOT_OF_KV)
    reader.generate.cache.no_cache = given.bypass_prefix_cache
    reader.generate.cache.salt = given.cache_salt


class Answer:
    """The responses to one request. `grow` is called with the bytes that an event adds at least, and may raise."""

    def __init__(
        self,
        request: pb.GenerateRequest,
        validated: ValidatedRequest,
        grow: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._asked, self._prompt, self._grow = request.response, validated.prompt, grow
        self._stops = frozenset(request.stopping.stop_token_ids)
        self._scored: list[TokenLogprobs] = []
        self._waits_for_scores = request.response.prompt_logprobs
        self._told = False
        self._shows_text = not request.response.HasField("output_text") or request.response.output_text

    def responses(self, event: GenerateEvent) -> Iterator[pb.GenerateResponse]:
        """Yield what an event adds. Raises EngineFailure for an output that ended in an error."""
        match event:
            case PromptLogprobs():
                self._grow(sum(LEAST_ENTRY_BYTES * (1 + len(each.top)) for each in event.logprobs))
                self._scored += event.logprobs
                return
            case Tokens():
                yield from self._first(whatever=True)
                yield pb.GenerateResponse(outputs=self._output(event))
            case Finished():
                yield from self._first(whatever=True)
                if event.reason is FinishReason.ERROR:
                    raise EngineFailure(event.message or "the worker ended the output with an error; try again")
                yield pb.GenerateResponse(outputs=pb.SequenceOutput(index=event.index, finish_info=self._end(event)))
            case _:
                yield from self._first(whatever=not self._waits_for_scores)

    def _first(self, whatever: bool) -> Iterator[pb.GenerateResponse]:
        """Yield the facts of the prompt, once; its log-probabilities come between the admission and the output."""
        if whatever and not self._told:
            self._told = True
            yield pb.GenerateResponse(prompt_info=self._info())

    def _info(self) -> pb.PromptInfo:
        info = pb.PromptInfo(num_prompt_tokens=len(self._prompt))
        if self._asked.prompt_token_ids:
            info.token_ids.extend(self._prompt)
        if self._asked.prompt_logprobs:
            info.logprobs.append(0.0)
            info.ranks.append(0)
            info.candidate_tokens.add()
            _add_logprobs(info, self._scored)
        self._scored = []
        return info

    def _output(self, event: Tokens) -> pb.SequenceOutput:
        text = event.text if self._shows_text else ""
        self._grow(len(text) + len(event.token_ids) * self._asked.output_token_ids)
        output = pb.SequenceOutput(index=event.index, text=text, num_tokens=len(event.token_ids))
        if self._asked.output_token_ids:
            output.token_ids.extend(event.token_ids)
        if self._asked.output_logprobs:
            self._grow(sum(LEAST_ENTRY_BYTES * (1 + len(each.top)) for each in event.logprobs))
            _add_logprobs(output, event.logprobs, ranked=not self._asked.output_candidates.token_ids.ids)
        return output

    def _end(self, event: Finished) -> pb.FinishInfo:
        found = pb.FinishInfo(
            num_output_tokens=event.usage.output_tokens,
            finish_reason=_REASONS.get(event.reason, pb.FinishInfo.ABORTED),
            num_cached_tokens=event.usage.cached_tokens,
        )
        if event.stop_string is not None:
            found.stop_string = event.stop_string
        elif event.stop_token_id is not None and event.stop_token_id in self._stops:
            found.stop_token_id = event.stop_token_id
        elif event.stop_token_id is not None:
            found.eos_token_id = event.stop_token_id
        return found


_REASONS: Final = {FinishReason.STOP: pb.FinishInfo.STOP, FinishReason.LENGTH: pb.FinishInfo.LENGTH}


def _add_logprobs(
    message: pb.PromptInfo | pb.SequenceOutput, entries: Sequence[TokenLogprobs], ranked: bool = True
) -> None:
    """Add each token's log-probability, its rank (0 for unknown), and other tokens of its place.

    `ranked`: the others are the likeliest ones, in that order.
    """
    for entry in entries:
        places = {token_id: rank * ranked for rank, (token_id, _) in enumerate(entry.top, 1)}
        message.logprobs.append(entry.logprob)
        message.ranks.append(entry.rank or places.get(entry.token_id, 0))
        others = message.candidate_tokens.add().tokens
        for token_id, logprob in entry.top:
            if token_id != entry.token_id:
                others.add(id=token_id, logprob=logprob, rank=places[token_id])


def merged(responses: Sequence[pb.GenerateResponse]) -> pb.GenerateResponse:
    """Return the responses to a request for one sequence as a single one."""
    whole = pb.GenerateResponse()
    texts = [each.outputs.text for each in responses]
    for each in responses:
        whole.MergeFrom(each)
    whole.outputs.text = "".join(texts)
    whole.outputs.num_tokens = sum(each.outputs.num_tokens for each in responses)
    return whole
