"""Which options `quire bench` tries, and what it recommends from exact ratios."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cli.benchmark.advice import Advice, Alternative, Comparison, Setting, advise, alternatives

SETTING = Setting("cpu", True, "none", threads=3, cores=4, kv_dtype="float32", block_size=16)
STEADY = (100.0, 101.0, 100.0, 101.0, 100.0)


def compared(option: str, value: str, after: tuple[float, ...], room: float = 1.0) -> Comparison:
    return Comparison(Alternative(option, value), STEADY, after, room)


def test_every_option_is_tried_once_before_any_is_tried_twice() -> None:
    assert [each.words for each in alternatives(SETTING)] == [
        "--quantization int8",
        "--threads 4",
        "--kv-cache-dtype int8",
        "--block-size 32",
        "--quantization w8a8",
        "--threads 2",
        "--kv-cache-dtype bfloat16",
        "--block-size 64",
    ]


@pytest.mark.parametrize(
    ("setting", "tried"),
    [
        (replace(SETTING, native=False), {"threads", "kv_cache_dtype", "block_size"}),
        (replace(SETTING, quantization="int8"), {"threads", "kv_cache_dtype", "block_size"}),
        (replace(SETTING, device="cuda:0", native=False), {"kv_cache_dtype", "block_size"}),
        (replace(SETTING, threads=1, cores=1, kv_dtype="int8"), {"quantization", "block_size"}),
    ],
    ids=["transformers", "quantised already", "GPU", "one core"],
)
def test_what_cannot_be_had_is_not_tried(setting: Setting, tried: set[str]) -> None:
    assert {each.option for each in alternatives(setting)} == tried


def test_the_present_value_is_no_alternative() -> None:
    setting = replace(SETTING, block_size=32, threads=4, cores=4, kv_dtype="bfloat16")
    words = {each.words for each in alternatives(setting)}
    assert {"--block-size 16", "--block-size 64", "--threads 2", "--kv-cache-dtype int8"} <= words
    assert not words & {"--block-size 32", "--threads 4", "--kv-cache-dtype bfloat16"}


def test_ratios_are_of_the_same_turn() -> None:
    found = compared("threads", "4", (150.0, 202.0, 120.0, 202.0, 150.0))
    assert found.ratios == (1.5, 2.0, 1.2, 2.0, 1.5)
    assert found.ratio == 1.5


def test_noise_is_twice_the_usual_change_between_equal_runs() -> None:
    assert compared("threads", "4", STEADY).noise == 0.03, "at least"
    unsteady = Comparison(Alternative("threads", "4"), (100.0, 110.0, 99.0, 108.9), (1.0,) * 4)
    assert unsteady.noise == pytest.approx(0.2)


def test_a_gain_above_the_noise_is_recommended_with_its_ratio() -> None:
    found = advise(SETTING, [compared("quantization", "int8", (150.0, 152.0, 151.0, 153.0, 150.0))], blocks_bind=False)
    reason = "1.50 times the tokens a second (1.50 to 1.51); answers change a little"
    assert found == [Advice("quantization", "--quantization int8", reason)]


def test_the_best_of_several_gains_is_recommended() -> None:
    slower, faster = (
        compared("threads", name, tuple(by * each for each in STEADY)) for name, by in (("4", 1.2), ("2", 1.4))
    )
    assert [each.flags for each in advise(SETTING, [slower, faster], blocks_bind=False)] == ["--threads 2"]


def test_a_gain_that_one_turn_lacks_is_within_noise() -> None:
    found = advise(SETTING, [compared("threads", "4", (110.0, 111.0, 110.0, 100.0, 110.0))], blocks_bind=False)
    assert found == [Advice("threads", "", "keep 3: 4 gives 1.10, within noise (3 %)")]


def test_a_loss_is_said_without_the_word_noise() -> None:
    found = advise(SETTING, [compared("block_size", "64", (80.0, 80.8, 80.0, 80.8, 80.0))], blocks_bind=False)
    assert found == [Advice("block_size", "", "keep 16: 64 gives 0.80")]


@pytest.mark.parametrize(("blocks_bind", "flags"), [(True, "--kv-cache-dtype int8"), (False, "")])
def test_room_is_a_reason_where_the_blocks_bind(blocks_bind: bool, flags: str) -> None:
    [found] = advise(SETTING, [compared("kv_cache_dtype", "int8", STEADY, room=3.6)], blocks_bind)
    assert found.flags == flags
    assert "3.6 times the tokens fit" in found.reason
    assert "within noise" in found.reason


def test_room_is_no_reason_to_become_slower() -> None:
    [found] = advise(SETTING, [compared("kv_cache_dtype", "int8", (80.0,) * 5, room=3.6)], blocks_bind=True)
    assert found == Advice("kv_cache_dtype", "", "keep float32: int8 gives 0.80, and 3.6 times the tokens fit")


def test_an_option_without_a_measurement_gets_no_advice() -> None:
    assert advise(SETTING, [], blocks_bind=True) == []
