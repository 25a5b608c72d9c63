"""The meter: rates of progress, and the length of an update in the mode that runs."""

from __future__ import annotations

from typing import Any

from adapipe.policy.meter import Meter, Reading, rate


def update(number: int, mode: str, seconds: float) -> dict[str, Any]:
    return {"update": number, "mode": mode, "training_seconds": seconds, "skipped_stages": [], "flushed": True}


def evaluation(number: int, seconds: float, loss: float | None) -> dict[str, Any]:
    return {"update": number, "mode": "sync", "training_seconds": seconds, "held_out_loss": loss}


def test_the_rate_is_loss_gained_per_second() -> None:
    assert rate(Reading(10, 5.0, 3.0), Reading(30, 9.0, 2.0)) == 0.25
    assert rate(Reading(10, 5.0, 2.0), Reading(30, 9.0, 3.0)) == -0.25


def test_two_readings_at_one_time_have_a_rate_all_the_same() -> None:
    assert rate(Reading(1, 5.0, 3.0), Reading(1, 5.0, 3.0)) == 0.0


def test_a_fresh_meter_knows_nothing() -> None:
    meter = Meter()
    assert (meter.update, meter.seconds, meter.reading, meter.seconds_per_update) == (0, 0.0, None, None)


def test_seconds_per_update_are_of_the_mode_that_runs() -> None:
    meter = Meter()
    for line in (update(1, "sync", 2.0), update(2, "sync", 5.0)):
        meter.observe(line)
    assert meter.seconds_per_update == 2.5
    meter.observe(update(3, "async", 6.0))
    assert meter.seconds_per_update == 1.0
    meter.observe(update(4, "async", 6.5))
    assert meter.seconds_per_update == 0.75
    meter.observe(update(5, "sync", 9.5))
    assert meter.seconds_per_update == 3.0
    assert (meter.update, meter.seconds) == (5, 9.5)


def test_an_evaluation_is_a_reading_and_no_update() -> None:
    meter = Meter()
    meter.observe(evaluation(0, 0.0, 4.0))
    assert meter.reading == Reading(0, 0.0, 4.0)
    meter.observe(update(1, "sync", 2.0))
    meter.observe(evaluation(1, 2.0, 3.5))
    assert meter.reading == Reading(1, 2.0, 3.5)
    assert meter.seconds_per_update == 2.0


def test_a_loss_that_was_not_finite_is_no_reading() -> None:
    meter = Meter()
    meter.observe(evaluation(0, 0.0, 4.0))
    meter.observe(evaluation(7, 3.0, None))
    assert meter.reading == Reading(0, 0.0, 4.0)
