"""The tally: totals, phases and the end of a run from its lines."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapipe.training.summary import Phase, Tally, perplexity, phases

REQUIRED = {
    *("mode", "stages", "microbatches", "updates", "tokens", "seed", "clock", "training_seconds"),
    *("held_out_loss", "held_out_perplexity", "target_perplexity", "seconds_to_target"),
    *("tokens_per_second", "idle_share", "switches", "phases"),
}


def update(number: int, mode: str, seconds: float, tokens: int = 0, idle: tuple[float, ...] = (0.0,)) -> dict[str, Any]:
    return {
        "update": number,
        "mode": mode,
        "tokens": tokens,
        "training_seconds": seconds,
        "idle_share": list(idle),
        "skipped_stages": [],
        "flushed": True,
    }


def evaluation(number: int, seconds: float, loss: float, took: float = 0.0) -> dict[str, Any]:
    return {
        "update": number,
        "mode": "sync",
        "training_seconds": seconds,
        "held_out_loss": loss,
        "held_out_perplexity": perplexity(loss),
        "evaluation_seconds": took,
    }


def tally(lines: list[dict[str, Any]], target: float | None = None) -> Tally:
    total = Tally(target)
    for line in lines:
        total.add(line)
    return total


def summary(total: Tally) -> dict[str, Any]:
    return total.summary(mode="plan", stages=2, microbatches=4, seed=None, clock="wall")


MIXED = [
    evaluation(0, 0.0, 3.0, took=0.25),
    update(1, "sync", 2.0, tokens=100, idle=(0.25, 0.75)),
    update(2, "sync", 3.0, tokens=200, idle=(0.0, 0.5)),
    update(3, "async", 4.5, tokens=500, idle=(0.0, 0.125)),
    evaluation(3, 4.5, 2.0, took=0.5),
    update(4, "async", 5.0, tokens=600, idle=(0.5, 0.5)),
    update(5, "sync", 6.0, tokens=700, idle=(0.0, 0.0)),
]


def test_the_summary_of_a_mixed_run() -> None:
    got = summary(tally(MIXED))
    assert got.keys() >= REQUIRED
    assert {name: got[name] for name in ("updates", "tokens", "training_seconds", "evaluation_seconds")} == {
        "updates": 5,
        "tokens": 700,
        "training_seconds": 6.0,
        "evaluation_seconds": 0.75,
    }
    assert got["held_out_loss"] == 2.0
    assert got["held_out_perplexity"] == math.exp(2.0)
    assert got["tokens_per_second"] == {"sync": 300 / 4.0, "async": 400 / 2.0}
    # Weighted by time, mean over the stages.
    assert got["idle_share"]["sync"] == pytest.approx((2.0 * 0.5 + 1.0 * 0.25 + 1.0 * 0.0) / 4.0)
    assert got["idle_share"]["async"] == pytest.approx((1.5 * 0.0625 + 0.5 * 0.5) / 2.0)
    assert got["switches"] == 2
    assert got["phases"] == [
        {"mode": "sync", "first_update": 0, "updates": 2, "seconds": 3.0},
        {"mode": "async", "first_update": 2, "updates": 2, "seconds": 2.0},
        {"mode": "sync", "first_update": 4, "updates": 1, "seconds": 1.0},
    ]


def test_what_there_is_not_is_none() -> None:
    got = summary(tally([]))
    assert got.keys() >= REQUIRED
    for name in ("held_out_loss", "held_out_perplexity", "target_perplexity", "seconds_to_target", "seed"):
        assert got[name] is None
    assert got["tokens_per_second"] == got["idle_share"] == {"sync": None, "async": None}
    assert (got["updates"], got["switches"], got["phases"]) == (0, 0, [])


def test_a_mode_that_never_ran_has_no_speed() -> None:
    got = summary(tally([update(1, "async", 2.0, tokens=10)]))
    assert got["tokens_per_second"] == {"sync": None, "async": 5.0}
    assert got["idle_share"] == {"sync": None, "async": 0.0}


def test_the_target_is_reached_once() -> None:
    lines = [evaluation(0, 0.0, 3.0), evaluation(5, 7.0, 2.0), evaluation(9, 9.0, 2.5), evaluation(12, 11.0, 1.0)]
    assert not tally(lines, math.exp(0.5)).reached_target
    reached = tally(lines, math.exp(2.0))
    assert reached.reached_target
    assert summary(reached)["seconds_to_target"] == 7.0
    assert summary(reached)["target_perplexity"] == math.exp(2.0)
    assert summary(reached)["held_out_loss"] == 1.0
    assert tally(lines, math.exp(5.0)).seconds_to_target == 0.0


def test_a_loss_that_is_not_finite_reaches_no_target() -> None:
    assert not tally([evaluation(0, 0.0, math.nan), evaluation(1, 0.0, math.inf)], 1e300).reached_target


@pytest.mark.parametrize(("loss", "value"), [(0.0, 1.0), (1.0, math.e), (699.0, math.exp(699.0)), (1e4, math.inf)])
def test_perplexity(loss: float, value: float) -> None:
    assert perplexity(loss) == value


@given(modes=st.lists(st.sampled_from(["sync", "async"]), min_size=1, max_size=40), data=st.data())
def test_phases_and_totals_add_up(modes: list[str], data: st.DataObject) -> None:
    lines, clock, tokens = [], 0.0, 0
    for number, mode in enumerate(modes, start=1):
        clock += data.draw(st.floats(0.01, 10.0))
        tokens += data.draw(st.integers(1, 1000))
        lines.append(update(number, mode, clock, tokens, idle=(0.25, 0.75)))
        if data.draw(st.booleans()):
            lines.append(evaluation(number, clock, 1.0, took=1.0))
    total = tally(lines)
    assert total.phases == phases(lines)
    assert sum(phase.updates for phase in total.phases) == len(modes)
    assert sum(phase.seconds for phase in total.phases) == pytest.approx(clock)
    assert [mode for phase in total.phases for mode in [phase.mode] * phase.updates] == modes
    assert [phase.first_update for phase in total.phases[1:]] == [
        phase.first_update + phase.updates for phase in total.phases[:-1]
    ]
    assert all(one.mode != next_one.mode for one, next_one in zip(total.phases, total.phases[1:], strict=False))
    speeds = summary(total)["tokens_per_second"]
    by_mode = {mode: sum(phase.seconds for phase in total.phases if phase.mode == mode) for mode in ("sync", "async")}
    assert sum(speeds[mode] * by_mode[mode] for mode in by_mode if speeds[mode] is not None) == pytest.approx(tokens)
    for mode in ("sync", "async"):
        assert total.idle_share(mode) in (None, pytest.approx(0.5))


def test_phases_of_a_record_whose_clock_was_lost() -> None:
    lines = [update(1, "sync", 2.0), {**update(2, "sync", 0.0), "training_seconds": None}, update(3, "async", 5.0)]
    assert phases(lines) == [Phase("sync", 0, 2, 2.0), Phase("async", 2, 1, 3.0)]
