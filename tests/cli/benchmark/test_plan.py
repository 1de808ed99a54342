"""What `quire bench` plans: exact runs for models of exact speeds, and what it leaves out and why."""

from __future__ import annotations

import pytest

from cli.benchmark.plan import (
    Capacity,
    FirstRequest,
    LeftOut,
    Run,
    compared_run,
    plan,
    seconds_of_comparison,
    slots_in,
)
from common.contracts.types import KvGroup, KvGroupKind
from router.placement.worker_model import Capacity as Pool

ROOMY = Capacity(max_model_len=8192, max_num_seqs=64, slots=65536)
# 1 ms for a token of a prefill, 10 ms for a step.
QUICK = FirstRequest(prompt=32, first_token=0.032, step=0.010)
# 1 s and 10 s.
SLOW = FirstRequest(prompt=32, first_token=32.0, step=10.0)


def test_a_quick_model_is_measured_whole() -> None:
    found = plan(ROOMY, QUICK, seconds=160.0)
    assert found.left_out == ()
    assert [(run.kind, run.streams, run.prompt) for run in found.runs] == [
        ("streams", 1, 32),
        ("ttft", 1, 512),
        ("streams", 8, 32),
        ("streams", 32, 32),
        ("ttft", 1, 2048),
    ]
    assert [run.repeats for run in found.runs] == [3, 5, 3, 2, 3]
    assert [run.output for run in found.runs] == [180, 1, 105, 43, 1]


def test_a_run_takes_its_share_of_the_seconds() -> None:
    """Each gets 9 s at most: a step of 10 ms runs 9 s / 5 / 10 ms times, and a quarter more is kept for it."""
    one, *_, longest = plan(ROOMY, QUICK, seconds=160.0).runs
    assert one.seconds == pytest.approx(3 * 1.25 * (32 * 0.001 + 180 * 0.010))
    assert longest.seconds == pytest.approx(3 * 1.25 * 2048 * 0.001)


def test_a_slow_model_gets_what_fits() -> None:
    """One stream: 32 tokens of 1 s and 16 steps of 10 s, a quarter more: 240 s."""
    found = plan(ROOMY, SLOW, seconds=300.0)
    assert found.runs == (Run("streams", 1, 32, 16, repeats=1, seconds=240.0),)
    assert found.left_out == (
        LeftOut("first token after 512 tokens", "takes up to 640 s, and 60 s are left"),
        LeftOut("8 streams", "takes up to 660 s, and 60 s are left"),
        LeftOut("32 streams", "takes up to 2100 s, and 60 s are left"),
        LeftOut("first token after 2,048 tokens", "takes up to 2560 s, and 60 s are left"),
    )


def test_no_time_leaves_nothing_to_run() -> None:
    found = plan(ROOMY, QUICK, seconds=-1.0)
    assert found.runs == ()
    assert [each.what for each in found.left_out][:2] == ["1 stream", "first token after 512 tokens"]
    assert found.left_out[0].why.endswith("and 0 s are left")


def test_prompts_end_at_the_models_length() -> None:
    found = plan(Capacity(max_model_len=1024, max_num_seqs=64, slots=65536), QUICK, seconds=160.0)
    assert [run.prompt for run in found.runs if run.kind == "ttft"] == [512, 1023]
    why = "the model's length is 1,024: measured after 1,023"
    assert found.left_out == (LeftOut("first token after 2,048 tokens", why),)


def test_two_prompts_of_one_length_are_one_run() -> None:
    found = plan(Capacity(max_model_len=64, max_num_seqs=64, slots=65536), QUICK, seconds=160.0)
    assert [run.name for run in found.runs if run.kind == "ttft"] == ["first token after 63 tokens"]
    assert {run.output for run in found.runs if run.kind == "streams"} == {32}, "the rest of the length"


@pytest.mark.parametrize(
    ("capacity", "what", "why"),
    [
        (Capacity(8192, 8, 65536), "32 streams", "at most 8 sequences run in a step (--max-num-seqs)"),
        (Capacity(8192, 64, 2000), "32 streams", "the KV pool holds 2000 tokens, and they need 2400"),
    ],
    ids=["sequences", "slots"],
)
def test_streams_that_do_not_fit_are_left_out(capacity: Capacity, what: str, why: str) -> None:
    assert plan(capacity, QUICK, seconds=160.0).left_out == (LeftOut(what, why),)


def test_alternatives_are_compared_on_streams_of_about_a_second() -> None:
    """Steps of 8 streams take at most 17 ms here: 58 of them."""
    run = compared_run(ROOMY, QUICK)
    assert run == Run("streams", 8, 256, 58, 5, run.seconds)
    assert run.seconds == pytest.approx(2 * 5 * 1.25 * 58 * 0.017)
    assert compared_run(ROOMY, SLOW).output == 8


def test_a_comparison_counts_the_start_of_the_other_suite() -> None:
    run = Run("streams", 8, 256, 58, 5, seconds=12.0)
    assert seconds_of_comparison(run, QUICK, start_seconds=10.0) == pytest.approx(1.3 * 10 + 8 * 256 * 0.001 + 12 + 2)


def test_a_pool_of_few_slots_bounds_the_compared_prompts() -> None:
    run = compared_run(Capacity(max_model_len=8192, max_num_seqs=64, slots=640), QUICK)
    assert run.streams * (run.prompt + run.output) <= 640


def test_tokens_that_come_together_still_have_a_step() -> None:
    assert FirstRequest.seen(32, 1.0, [2.0, 2.0, 2.0, 5.0]) == FirstRequest(32, 1.0, 1.0)
    together = FirstRequest.seen(32, 1.0, [2.0] * 8)
    assert together.step > 0
    assert plan(ROOMY, together, seconds=160.0).runs


def test_a_pool_of_pages_holds_more_tokens_of_long_sequences() -> None:
    """A block takes 2 pages and 3; a window of 32 is 4 blocks of 16 at most, so 64 blocks take 128 pages and 12."""
    groups = (KvGroup(KvGroupKind.FULL, 0, 2, (0,)), KvGroup(KvGroupKind.WINDOW, 32, 3, (1,)))
    pool = Pool(num_blocks=1000, block_size=16, max_num_seqs=8, max_model_len=2048, groups=groups)
    assert slots_in(pool, 16) == 1000 // 5 * 16
    assert slots_in(pool, 1024) == 1000 // 140 * 1024


def test_a_pool_of_blocks_has_slots_whatever_the_length() -> None:
    pool = Pool(num_blocks=100, block_size=16, max_num_seqs=8, max_model_len=2048)
    assert (slots_in(pool, 16), slots_in(pool, 1024)) == (1600, 1600)
