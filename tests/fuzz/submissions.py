"""Submissions of a router that a worker accepts, most of them; some have one field of any other submission.

The hashes are those of the tokens: a wrong hash would be refused, and nothing behind that check reached.
"""

from __future__ import annotations

from typing import Final

from hypothesis import strategies as st

from common.contracts.hashing import little_endian_int32
from common.contracts.types import PoolIdentity
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from tests.fuzz.messages import messages
from tests.support.gpuworker.worker_harness import chain_of

# Of 16 submissions so many are as a router would send them.
_SOUND: Final = 12
_MOST_TOKENS: Final = 200
_CONSTRAINTS: Final = {
    "json_schema": ['{"type":"object"}', '{"enum":["a","b"]}', "{", ""],
    "regex": ["[ab]{1,3}", "(a|b)*c", "(", ""],
    "grammar": ['start: "a"+', "start: b", ""],
}
_DOMAINS: Final = st.sampled_from([b"", b"tenant", bytes(32)])
_FIELDS: Final = tuple(field.name for field in pb.Submit.DESCRIPTOR.fields)


@st.composite
def requests_of_a_router(draw: st.DrawFn, identity: PoolIdentity, vocab_size: int) -> list[pb.StreamRequest]:
    """Return submissions under handles from 1 on, forks of them, and cancels between them."""
    requests: list[pb.StreamRequest] = []
    parents: list[pb.Submit] = []
    for handle in range(1, draw(st.integers(2, 5))):
        submit = _submit(draw, identity, vocab_size, handle)
        forks = draw(st.booleans())
        if parents and forks:
            submit = _fork(parents[-1], handle)
        parents.append(submit)
        requests.append(pb.StreamRequest(submit=_flawed(draw, submit)))
        if not draw(st.integers(0, 3)):
            requests.append(pb.StreamRequest(cancel=pb.Cancel(handle=draw(st.integers(0, handle + 1)))))
    return requests


def _submit(draw: st.DrawFn, identity: PoolIdentity, vocab_size: int, handle: int) -> pb.Submit:
    tokens = draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=_MOST_TOKENS))
    submit = draw(messages(pb.Submit, likely=True))
    submit.handle, submit.index, submit.request_id = handle, draw(st.integers(0, 3)), f"fuzz-{handle}"
    # Another kind of worker follows these; `_flawed` gives them to some submissions here.
    for name in ("fork_of", "thought_budget", "thought_end_token_ids", "embeds", "adapter", "adapter_fingerprint"):
        submit.ClearField(name)
    submit.tenant = draw(st.sampled_from(["", "acme", "peer 127.0.0.1"]))
    submit.timeout_seconds = draw(st.sampled_from([0.0, 0.01, *[60.0] * 6]))
    _choose_constraint(draw, submit)
    submit.output_tokens_before = draw(st.integers(0, min(3, len(tokens) - 1)))
    submit.sampling.max_tokens = submit.output_tokens_before + draw(st.integers(1, 40))
    submit.sampling.min_tokens = draw(st.integers(0, submit.sampling.max_tokens))
    submit.sampling.prompt_logprobs = draw(st.sampled_from([0, 0, 1, 20]))
    submit.prompt_logprobs_before = draw(st.integers(0, len(tokens) - submit.output_tokens_before - 1))
    words = draw(st.lists(st.lists(st.integers(0, vocab_size), min_size=1, max_size=4), max_size=3))
    submit.bad_words[:] = map(little_endian_int32, words)
    submit.cache_domain = draw(_DOMAINS)
    submit.prompt_token_ids = little_endian_int32(tokens)
    submit.block_hashes, submit.parent_digest = chain_of(tokens, identity, submit.cache_domain)
    return submit


def _choose_constraint(draw: st.DrawFn, submit: pb.Submit) -> None:
    for name in _CONSTRAINTS:
        submit.ClearField(name)  # type: ignore[arg-type]
    # The simulated worker refuses every constraint.
    if not draw(st.integers(0, 9)):
        chosen = draw(st.sampled_from([*_CONSTRAINTS]))
        setattr(submit, chosen, draw(st.sampled_from(_CONSTRAINTS[chosen])))


def _fork(parent: pb.Submit, handle: int) -> pb.Submit:
    """Return a sequence that shares its parent's tokens."""
    fork = pb.Submit()
    fork.CopyFrom(parent)
    fork.handle, fork.index, fork.fork_of = handle, handle, parent.handle
    return fork


def _flawed(draw: st.DrawFn, submit: pb.Submit) -> pb.Submit:
    """Return a submission as it is, or with one field of any other one."""
    if draw(st.integers(0, 15)) < _SOUND:
        return submit
    name, other, flawed = draw(st.sampled_from(_FIELDS)), draw(messages(pb.Submit)), pb.Submit()
    flawed.CopyFrom(submit)
    flawed.ClearField(name)  # type: ignore[arg-type]
    for each in _FIELDS:
        if each != name:
            other.ClearField(each)  # type: ignore[arg-type]
    flawed.MergeFrom(other)
    return flawed
