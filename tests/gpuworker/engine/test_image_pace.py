"""How many images are taken at once, in exact numbers."""

from __future__ import annotations

import pytest

from gpuworker.engine.image_pace import ImagePace


def test_while_no_step_runs_only_bytes_bound_it() -> None:
    pace = ImagePace(100, 1000)
    assert pace.allowed(5.0, steps_run=False) == 10
    pace.note(10, 5.0, 6.0)
    assert pace.allowed(6.0, steps_run=False) == 10


@pytest.mark.parametrize(("image_bytes", "most"), [(1001, 1), (0, 1000), (500, 2)])
def test_one_image_at_least_is_taken_at_once(image_bytes: int, most: int) -> None:
    assert ImagePace(image_bytes, 1000).allowed(0.0, steps_run=True) == most


def test_beside_a_step_images_take_a_quarter_of_a_millisecond_at_once_and_a_tenth_of_the_time() -> None:
    pace = ImagePace(100, 1000)
    pace.note(10, 5.0, 5.0006)  # 0.06 ms each
    assert pace.allowed(5.0059, steps_run=True) == 0
    assert pace.wait(5.0059) == pytest.approx(5.006 - 5.0059)
    assert pace.allowed(5.0061, steps_run=True) == 4
    assert pace.wait(5.0061) == 0.0


def test_a_large_image_is_taken_alone_and_rests_ten_times_as_long() -> None:
    pace = ImagePace(100, 1000)
    pace.note(1, 1.0, 1.002)
    assert pace.allowed(1.0201, steps_run=True) == 1
    assert pace.wait(1.002) == pytest.approx(0.018)


def test_a_turn_that_waited_for_a_processor_hardly_counts_and_a_quick_one_does_at_once() -> None:
    pace = ImagePace(100, 1000)
    pace.note(2, 0.0, 0.0002)
    pace.note(2, 1.0, 1.5)
    assert pace.wait(1.5) == pytest.approx(2 * 0.00011 * 9)
    pace.note(2, 2.0, 2.00004)
    assert pace.wait(2.00004) == pytest.approx(2 * 0.00002 * 9)
