"""KV hints of vLLM's form: what they let a request retain, and what each of them is answered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.contracts.lease import RetainedTokens
from quire.inference.v1 import inference_pb2 as own
from quire.vllm.v1 import inference_pb2 as pb
from router.api.vllm.kv_hints import ANSWER_KEY, Answer, Outcome, bounded, packed, read_hints
from router.tenants.tenancy import Caller, Tenant
from tests.support.router.vllm_harness import Api

MONTH = 30 * 86_400.0


def action(payload: dict[str, Any], kind: str = "kv.retain", version: str = "1.0", name: str = "a1") -> pb.KVHintAction:
    made = pb.KVHintAction(action_id=name, action_type=kind, action_version=version)
    made.payload.update(payload)
    return made


def retain(*directives: Any, name: str = "a1", scope: str = "alice") -> pb.KVHintAction:
    return action({"scope": scope, "directives": list(directives)}, name=name)


def envelope(*actions: pb.KVHintAction, protocol: str = "0.1") -> pb.KVHintsEnvelope:
    return pb.KVHintsEnvelope(protocol_version=protocol, message_id="m1", actions=actions)


def read(*actions: pb.KVHintAction, protocol: str = "0.1") -> tuple[list[Answer], own.CacheRetention]:
    retention = own.CacheRetention()
    return list(read_hints(envelope(*actions, protocol=protocol), retention)), retention


def refusal(*actions: pb.KVHintAction) -> str:
    """Return why the last action is refused; it retains nothing."""
    answers, retention = read(*actions)
    assert answers[-1].outcome is Outcome.REFUSED
    assert len(actions) > 1 or retention == own.CacheRetention()
    return answers[-1].why


# ------------------------------------------------------------ what is retained


def test_ranges_and_the_output_are_retained_above_blocks_without_retention() -> None:
    answers, retention = read(
        retain(
            {"start": 0, "end": 32, "priority": 100, "duration": 60.0},
            {"start": 32, "end": 48, "priority": 50},
            {"covers_output": True, "priority": 1, "duration": 5},
        )
    )
    assert answers == [Answer("a1", Outcome.ACCEPTED, priority=100)]
    assert retention == own.CacheRetention(
        ranges=[
            own.RetentionRange(start=0, end=32, priority=100, duration=60.0),
            own.RetentionRange(start=32, end=48, priority=67),
        ],
        decode_priority=36,
        decode_duration=5.0,
    )


def test_a_range_without_an_end_has_the_output_too() -> None:
    answers, retention = read(retain({"start": 16, "end": None, "priority": 40, "duration": 9}))
    assert answers == [Answer("a1", Outcome.ACCEPTED, priority=61)]
    assert retention == own.CacheRetention(
        ranges=[own.RetentionRange(start=16, priority=61, duration=9.0)], decode_priority=61, decode_duration=9.0
    )


def test_actions_are_followed_in_their_order_and_a_wrong_one_leaves_the_others() -> None:
    answers, retention = read(
        retain({"start": 0, "end": 16, "priority": 50}, name="a1"),
        retain({"start": 16, "end": 32, "priority": 51}, name="a2"),
        retain({"start": 16, "end": 32, "priority": 50}, name="a3"),
    )
    assert [(each.action_id, each.outcome.value) for each in answers] == [
        ("a1", "accepted"),
        ("a2", "refused"),
        ("a3", "accepted"),
    ]
    assert answers[1].why == "priorities must not rise along the tokens; 51 stands behind 50"
    assert [(each.start, each.end) for each in retention.ranges] == [(0, 16), (16, 32)]


def test_an_action_without_directives_is_accepted() -> None:
    assert read(retain()) == ([Answer("a1", Outcome.ACCEPTED)], own.CacheRetention())


def test_what_is_followed_in_part_says_so() -> None:
    answers, retention = read(retain({"start": 0, "end": 16, "priority": 9}, {"start": 16, "end": 32, "priority": 0}))
    assert answers[0].outcome is Outcome.CLIPPED
    assert answers[0].why == "priority 0 retains nothing, and what was retained before stays for its own time"
    assert len(retention.ranges) == 1
    many = [{"start": 16 * place, "end": 16 * place + 16, "priority": 50} for place in range(18)]
    answers, retention = read(retain(*many))
    assert (answers[0].outcome, answers[0].why) == (Outcome.CLIPPED, "ranges beyond 16 are left out")
    assert len(retention.ranges) == 16


# ------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("kv.pin", "'kv.pin' is not followed: an operator pins prefixes, by `quire pin`"),
        ("kv.prefetch", "'kv.prefetch' is not followed: an operator prefetches, by `quire prefetch`"),
        ("kv.fetch", "'kv.fetch' is not followed: the KV manager fetches what pays by itself"),
        ("x" * 999, f"{'x' * 64!r} is not followed; expected 'kv.retain'"),
    ],
)
def test_other_actions_are_refused_with_what_does_that_here(kind: str, what: str) -> None:
    assert refusal(action({}, kind)) == what


@pytest.mark.parametrize(
    ("directive", "what"),
    [
        ({"start": 0, "end": 16}, "directives[0].priority must be a whole number of 0 to 100"),
        ({"priority": 101}, "directives[0].priority must be a whole number of 0 to 100"),
        ({"priority": True}, "directives[0].priority must be a whole number of 0 to 100"),
        ({"priority": 1.5}, "directives[0].priority must be a whole number of 0 to 100"),
        ({"priority": 1, "start": -1}, "directives[0].start must be a whole number of 0 to 2147483647"),
        ({"priority": 1, "start": 9, "end": 9}, "directives[0].end must be a whole number of 10 to 2147483647"),
        ({"priority": 1, "end": 1e300}, "directives[0].end must be a whole number of 1 to 2147483647"),
        ({"priority": 1, "duration": 0}, "directives[0].duration must be seconds, above 0 and at most 2592000"),
        ({"priority": 1, "duration": MONTH + 1}, "directives[0].duration must be seconds, above 0 and at most 2592000"),
        ({"priority": 1, "duration": "9"}, "directives[0].duration must be seconds, above 0 and at most 2592000"),
        (
            {"priority": 1, "covers_output": True, "start": 0},
            "directives[0].covers_output must be a boolean, and stands without start and end",
        ),
        (
            {"priority": 1, "covers_output": "no"},
            "directives[0].covers_output must be a boolean, and stands without start and end",
        ),
        (
            {"priority": 1, "until": 9},
            "directives[0] has 'until'; expected covers_output, duration, end, priority, start",
        ),
        ("all", "directives[0] must be an object; expected covers_output, duration, end, priority, start"),
    ],
    ids=str,
)
def test_a_directive_that_none_may_be_is_named(directive: Any, what: str) -> None:
    assert refusal(retain(directive)) == what


def test_payloads_of_another_form_are_refused() -> None:
    assert refusal(action({"directives": {}})) == "directives must be a list of at most 128"
    assert refusal(retain(*[{"priority": 1}] * 129)) == "directives must be a list of at most 128"
    assert refusal(action({"keys": [1]})) == "payload has 'keys'; expected scope and directives"
    assert refusal(action({"directives": []}, version="2.0")) == "version '2.0' of it is not known here; expected 1.x"
    assert refusal(retain({"priority": 1, "duration": float("nan")})).startswith(
        "payload has a value that JSON has not"
    )
    assert refusal(action({"scope": "a" * 70_000, "directives": []})).endswith("expected at most 65536")


def test_another_protocol_is_refused_for_each_action() -> None:
    answers, retention = read(retain({"priority": 9}), retain(name="a2"), protocol="2.0")
    assert [each.why for each in answers] == ["protocol '2.0' is not spoken here; expected '0.1'"] * 2
    assert retention == own.CacheRetention()


def test_actions_beyond_sixteen_are_refused_at_once() -> None:
    answers, _ = read(*[retain(name=f"a{place}") for place in range(999)])
    assert len(answers) == 17
    assert (answers[16].action_id, answers[16].why) == ("a16", "is beyond 16 actions, as are all behind it")


def test_the_longest_answer_fits_into_metadata() -> None:
    asked = envelope(*[action({}, "k" * 9999, name="n" * 9999) for _ in range(99)])
    answers = read_hints(asked, own.CacheRetention())
    assert len(packed(asked, answers, "m-1")) < 6000


def test_what_the_tenant_may_not_is_told() -> None:
    answers, _ = read(retain({"start": 0, "end": 16, "priority": 100}))
    (lowered,) = bounded(answers, [RetainedTokens(0, 16, 60, MONTH)])
    assert (lowered.outcome, lowered.why) == (Outcome.CLIPPED, "the tenant retains with priority 60 at most")
    (nothing,) = bounded(answers, [])
    assert nothing.why == "nothing of it is retained: the tenant may not, or the prompt has no such tokens"
    assert bounded(answers, [RetainedTokens(0, 16, 100, MONTH)]) == answers


# ------------------------------------------------------------ over gRPC


async def answered(api: Api, hints: pb.KVHintsEnvelope, streaming: bool) -> dict[str, Any]:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(5, 45)), kv_hints=hints)
    if streaming:
        stream = api.inference.GenerateStream(request)
        assert [each async for each in stream]
        metadata = await stream.trailing_metadata()
    else:
        call = api.inference.Generate(request)
        await call
        metadata = await call.trailing_metadata()
    (found,) = [value for key, value in metadata if key == ANSWER_KEY]
    return json.loads(found)  # type: ignore[no-any-return]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("streaming", [False, True])
async def test_a_request_is_served_and_its_hints_are_answered_behind_it(api: Api, streaming: bool) -> None:
    asked = envelope(retain({"start": 0, "end": 32, "priority": 90, "duration": 60.0}), action({}, "kv.pin", name="a2"))
    found = await answered(api, asked, streaming)
    assert found.pop("decision_id")
    assert found == {
        "message_id": "m1",
        "actions": [
            {"action_id": "a1", "outcome": "accepted"},
            {
                "action_id": "a2",
                "outcome": "refused",
                "reason": "'kv.pin' is not followed: an operator pins prefixes, by `quire pin`",
            },
        ],
    }
    assert api.served.retention == (RetainedTokens(0, 32, 93, 60.0),)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_tenant_retains_within_its_bound_whatever_hints_say(api: Api) -> None:
    api.callers.now = Caller(Tenant("small", max_retention_priority=50))
    found = await answered(api, envelope(retain({"start": 0, "end": 32, "priority": 90})), streaming=True)
    assert found["actions"] == [
        {"action_id": "a1", "outcome": "clipped", "reason": "the tenant retains with priority 50 at most"}
    ]
    assert api.served.retention == (RetainedTokens(0, 32, 50, MONTH),)
