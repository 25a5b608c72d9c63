import re
from collections.abc import Sequence
from itertools import accumulate
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapipe.errors import ScheduleError
from adapipe.schedule.actions import Action, Kind, parse_order
from adapipe.schedule.checker import CheckReport, StageReport, check_orders, check_segment
from adapipe.schedule.orders import evaluation_order, segment_orders

stages_, microbatches_, updates_ = st.integers(1, 12), st.integers(1, 16), st.integers(1, 8)
first_updates_ = st.integers(0, 3)


def parse(*rows: str) -> list[list[Action]]:
    return [parse_order(row) for row in rows]


def rejection(orders: Sequence[Sequence[Action]], microbatches: int, **options: object) -> str:
    """The message with which the checker rejects the orders."""
    with pytest.raises(ScheduleError) as error:
        check_orders(orders, microbatches, **options)  # type: ignore[arg-type]
    return str(error.value)


def assert_rejected(message: str, place: str, reason: str) -> None:
    """The first line is `place: reason`, and the grid marks the cell of the place and no other."""
    assert message.splitlines()[0] == f"{place}: {reason}"
    stage, position, cell = re.fullmatch(r"stage (\d+), position (\d+), (\w+)", place).groups()  # type: ignore[union-attr]
    assert re.findall(r">(\w+)<", message) == [cell]
    row = next(line for line in message.splitlines() if f">{cell}<" in line).split()
    assert row[:2] == ["stage", stage]
    assert row[2:].index(f">{cell}<") == int(position)


def replay(order: Sequence[Action], microbatches: int, first_update: int) -> tuple[dict[int, int], int, int]:
    """Staleness, peak in flight and peak versions, from their definitions, without the closed forms."""
    updates_before = list(accumulate((action.kind is Kind.UPDATE for action in order), initial=0))
    done = {(action.kind, action.index): position for position, action in enumerate(order)}
    staleness, lives = {}, {}
    for (kind, i), position in done.items():
        if kind is Kind.FORWARD:
            update_at = done[Kind.UPDATE, i // microbatches]
            staleness[i] = updates_before[update_at] - updates_before[position]
            lives[i] = range(position, done[Kind.BACKWARD, i])
    in_flight, versions = 0, 0
    for now in range(len(order)):
        alive = [i for i, life in lives.items() if now in life]
        in_flight = max(in_flight, len(alive))
        versions = max(versions, len({updates_before[lives[i].start] for i in alive} | {updates_before[now + 1]}))
    return staleness, in_flight, versions


# What every segment must satisfy.


@given(stages_, microbatches_, updates_, first_updates_, st.integers(1, 4))
@settings(deadline=None)
def test_every_segment_passes_with_the_figures_of_the_laws(
    stages: int, microbatches: int, updates: int, first_update: int, in_flight: int
) -> None:
    report = check_segment(stages, microbatches, updates, first_update, in_flight)
    total = updates * microbatches
    assert len(report.stages) == stages
    for stage, figures in enumerate(report.stages):
        delay = in_flight * (stages - 1 - stage)  # how many forwards a stage is ahead of its backwards
        reads = [max(0, (j - delay) // microbatches) for j in range(total)]
        first = first_update * microbatches
        assert dict(figures.staleness) == {first + j: j // microbatches - reads[j] for j in range(total)}
        assert figures.peak_in_flight == min(1 + delay, total)
        applied = range(microbatches, total + 1, microbatches)  # backwards before each update
        assert figures.peak_versions == max(
            len({*reads[done : done + delay], done // microbatches}) for done in applied
        )


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), first_updates_)
@settings(deadline=None)
def test_the_figures_equal_a_replay(stages: int, microbatches: int, updates: int, first_update: int) -> None:
    report = check_segment(stages, microbatches, updates, first_update)
    for order, figures in zip(segment_orders(stages, microbatches, updates, first_update), report.stages, strict=True):
        expected = replay(order, microbatches, first_update)
        assert (dict(figures.staleness), figures.peak_in_flight, figures.peak_versions) == expected


@given(stages_, microbatches_)
@settings(deadline=None)
def test_the_mean_staleness_of_steady_state_is_the_law(stages: int, microbatches: int) -> None:
    updates = stages + 2  # long enough for K microbatches of steady state on every stage
    report = check_segment(stages, microbatches, updates)
    for stage, figures in enumerate(report.stages):
        steady = list(figures.staleness.values())[stages - 1 - stage :]
        for start in range(len(steady) - microbatches + 1):
            window = steady[start : start + microbatches]
            assert mean(window) == pytest.approx((stages - 1 - stage) / microbatches)


@given(stages_, microbatches_, st.lists(st.integers(1, 4), min_size=1, max_size=4), first_updates_)
@settings(deadline=None)
def test_segments_in_sequence_have_the_figures_of_each(
    stages: int, microbatches: int, segments: list[int], first_update: int
) -> None:
    starts = list(accumulate(segments, initial=first_update))
    parts = [segment_orders(stages, microbatches, n, start) for n, start in zip(segments, starts, strict=False)]
    joined = [[action for part in parts for action in part[stage]] for stage in range(stages)]
    alone = [check_segment(stages, microbatches, n, start) for n, start in zip(segments, starts, strict=False)]
    report = check_orders(joined, microbatches)
    for stage, figures in enumerate(report.stages):
        expected = [part.stages[stage] for part in alone]
        assert dict(figures.staleness) == {i: d for part in expected for i, d in part.staleness.items()}
        assert figures.peak_in_flight == max(part.peak_in_flight for part in expected)
        assert figures.peak_versions == max(part.peak_versions for part in expected)


@given(stages_, microbatches_, updates_)
@settings(deadline=None)
def test_a_flush_after_every_update_leaves_no_staleness(stages: int, microbatches: int, updates: int) -> None:
    joined: list[list[Action]] = [[] for _ in range(stages)]
    for update in range(updates):
        for stage, order in enumerate(segment_orders(stages, microbatches, 1, update)):
            joined[stage] += order
    for figures in check_orders(joined, microbatches, flush_every=1).stages:
        assert set(figures.staleness.values()) == {0}
        assert figures.peak_versions == 1


@given(st.integers(2, 12), microbatches_, updates_)
@settings(deadline=None)
def test_the_default_rings_are_as_small_as_can_be(stages: int, microbatches: int, updates: int) -> None:
    orders = segment_orders(stages, microbatches, updates)
    bounds = [stages - stage for stage in range(stages)]
    check_orders(orders, microbatches, activation_slots=[bound + 1 for bound in bounds])
    too_small = [stage for stage in range(1, stages) if updates * microbatches > bounds[stage]]
    if too_small:
        message = rejection(orders, microbatches, activation_slots=bounds)
        assert message.startswith(f"stage {too_small[0]}, ")
        assert "no slot is free" in message


@given(stages_, st.integers(1, 40))
@settings(deadline=None)
def test_an_evaluation_passes(stages: int, microbatches: int) -> None:
    report = check_orders([list(evaluation_order(s, microbatches)) for s in range(stages)], 3)
    assert report == CheckReport((StageReport({}, 0, 1),) * stages)


def test_an_evaluation_may_begin_at_any_microbatch() -> None:
    check_orders(parse("0F7 0F8", "1F7 1F8"), 3)


def test_a_deep_pipeline_is_checked_fast() -> None:
    assert check_segment(64, 64, 2).stages[0].peak_in_flight == 64


def test_other_legal_orders_pass() -> None:
    """Fewer forwards ahead than 1F1B, and backwards in another order than forwards."""
    one_at_a_time = parse("0F0 0B0 0F1 0B1 0U0 0F2 0B2 0F3 0B3 0U1", "1F0 1B0 1F1 1B1 1U0 1F2 1B2 1F3 1B3 1U1")
    assert check_orders(one_at_a_time, 2, flush_every=1).stages[0] == StageReport(dict.fromkeys(range(4), 0), 1, 1)
    forwards_permuted = parse("0F1 0F0 0B1 0B0 0U0", "1F1 1B1 1F0 1B0 1U0")
    assert list(check_orders(forwards_permuted, 2).stages[0].staleness) == [1, 0]


# Orders with one row broken. The others are those of P = 2, K = 2, n = 2.

BASE = ["0F0 0F1 0B0 0F2 0B1 0U0 0F3 0B2 0B3 0U1", "1F0 1B0 1F1 1B1 1U0 1F2 1B2 1F3 1B3 1U1"]


def test_the_base_passes() -> None:
    assert parse(*BASE) == segment_orders(2, 2, 2)
    check_orders(parse(*BASE), 2)


@pytest.mark.parametrize(
    ("stage", "row", "place", "reason"),
    [
        pytest.param(
            1,
            "1B0 1F0 1F1 1B1 1U0 1F2 1B2 1F3 1B3 1U1",
            "stage 1, position 0, 1B0",
            "the forward of microbatch 0 has not run before it",
            id="backward before forward",
        ),
        pytest.param(
            0,
            "0F0 0F1 0B0 0B1 0U0 0F3 0B2 0B3 0U1",
            "stage 0, position 6, 0B2",
            "the forward of microbatch 2 has not run before it",
            id="forward missing",
        ),
        pytest.param(
            1,
            "1F0 1F1 1B1 1U0 1F2 1B2 1F3 1B3 1U1",
            "stage 1, position 0, 1F0",
            "microbatch 0 has no backward",
            id="backward missing",
        ),
        pytest.param(
            0,
            "0F0 0F1 0B0 0F1 0B1 0U0 0F2 0F3 0B2 0B3 0U1",
            "stage 0, position 3, 0F1",
            "the forward of microbatch 1 runs a second time",
            id="forward twice",
        ),
        pytest.param(
            1,
            "1F0 1B0 1F1 1B0 1B1 1U0 1F2 1B2 1F3 1B3 1U1",
            "stage 1, position 3, 1B0",
            "the backward of microbatch 0 runs a second time",
            id="backward twice",
        ),
        pytest.param(
            1,
            "1F1 1B1 1F0 1B0 1U0 1F2 1B2 1F3 1B3 1U1",
            "stage 1, position 0, 1F1",
            "expects the activation of microbatch 1, but the next on the edge from stage 0 is 0",
            id="forwards swapped",
        ),
        pytest.param(
            0,
            "0F0 0F1 0B1 0F2 0B0 0U0 0F3 0B2 0B3 0U1",
            "stage 0, position 2, 0B1",
            "expects the gradient of microbatch 1, but the next on the edge from stage 1 is 0",
            id="backwards swapped",
        ),
        pytest.param(
            1,
            "1F0 1B0 1F1 1B1 1U0",
            "stage 0, position 3, 0F2",
            "stage 1 never receives the activation of microbatch 2",
            id="receiver ends early",
        ),
        pytest.param(
            0,
            "0F0 0F1 0B0 0B1 0U0",
            "stage 1, position 5, 1F2",
            "expects the activation of microbatch 2, but stage 0 sends no more",
            id="sender ends early",
        ),
        pytest.param(
            0,
            "0F0 0F1 0B0 0U0 0F2 0B1 0F3 0B2 0B3 0U1",
            "stage 0, position 3, 0U0",
            "too early: the backward of microbatch 1 has not run",
            id="update too early",
        ),
        pytest.param(
            1,
            "1F0 1B0 1F1 1B1 1F2 1B2 1U0 1F3 1B3 1U1",
            "stage 1, position 6, 1U0",
            "too late: the backward of microbatch 2 belongs to another update",
            id="update too late",
        ),
        pytest.param(
            1,
            "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1U1",
            "stage 1, position 8, 1U1",
            "update 1 out of turn: the next is update 0",
            id="first update missing",
        ),
        pytest.param(
            1,
            "1F0 1B0 1F1 1B1 1U0 1F2 1B2 1F3 1B3",
            "stage 1, position 6, 1B2",
            "no update follows; 1 must apply it",
            id="last update missing",
        ),
        pytest.param(
            0,
            "0F0 0F1 0B0 0F2 0B1 0U5 0F3 0B2 0B3 0U1",
            "stage 0, position 5, 0U5",
            "update 5 out of turn: the next is update 0",
            id="update with a wrong number",
        ),
        pytest.param(
            0,
            "0F0 0F1 0B0 0F2 0B1 0U0 0U0 0F3 0B2 0B3 0U1",
            "stage 0, position 6, 0U0",
            "update 0 out of turn: the next is update 1",
            id="update twice",
        ),
    ],
)
def test_a_broken_row_is_rejected(stage: int, row: str, place: str, reason: str) -> None:
    rows = [*BASE]
    rows[stage] = row
    assert_rejected(rejection(parse(*rows), 2), place, reason)


def test_an_action_of_another_stage_is_rejected() -> None:
    orders = parse(*BASE)
    orders[0][4] = orders[1][3]
    message = rejection(orders, 2)
    assert_rejected(message, "stage 0, position 4, 1B1", "an action of stage 1 in the row of stage 0")


def test_rows_in_the_wrong_order_are_rejected() -> None:
    message = rejection(parse(*reversed(BASE)), 2)
    assert_rejected(message, "stage 0, position 0, 1F0", "an action of stage 1 in the row of stage 0")


def test_orders_that_begin_inside_an_update_are_rejected() -> None:
    message = rejection(parse("0F3 0B3 0F4 0B4 0U1"), 2)
    reason = "the first microbatch must begin an update, so be a multiple of 2"
    assert_rejected(message, "stage 0, position 0, 0F3", reason)


def test_updates_without_microbatches_are_rejected() -> None:
    message = rejection(parse("0U0"), 2)
    assert_rejected(message, "stage 0, position 0, 0U0", "too early: the backward of microbatch 0 has not run")


def test_one_stage_cannot_evaluate_while_another_trains() -> None:
    message = rejection(parse("0F0", "1F0 1B0 1U0"), 1)
    assert_rejected(message, "stage 0, position 0, 0F0", "microbatch 0 has no backward")


# Orders that are complete and in step, but break a law.


def test_too_much_in_flight_is_rejected() -> None:
    orders = parse("0F0 0F1 0B0 0B1 0U0", "1F0 1F1 1B0 1B1 1U0")
    reason = "2 microbatches in flight, at most 1 + W = 1 is allowed"
    assert_rejected(rejection(orders, 2, activation_slots=[9, 9]), "stage 1, position 1, 1F1", reason)


def test_staleness_beyond_the_law_is_rejected() -> None:
    """Stage 0 lets F2 pass before U0: it has room for it, but F2 then reads weights two updates old."""
    orders = parse("0F0 0F1 0B0 0F2 0U0 0B1 0U1 0B2 0U2", "1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2")
    reason = "its staleness is 2 updates, at most ceil(W/K) = 1 is allowed"
    assert_rejected(rejection(orders, 1), "stage 0, position 3, 0F2", reason)


def test_too_many_versions_are_rejected() -> None:
    """After U1 stage 0 holds versions 0 (for F2), 1 (for F3) and 2."""
    orders = parse(
        "0F0 0F1 0B0 0F2 0U0 0B1 0F3 0U1 0B2 0U2 0B3 0U3",
        "1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2 1F3 1B3 1U3",
    )
    reason = "3 weight versions, at most 1 + ceil(W/K) = 2 is allowed"
    assert_rejected(rejection(orders, 1), "stage 0, position 7, 0U1", reason)


def test_a_stage_that_drains_alone_is_rejected() -> None:
    """Stage 0 never drains, so the segment is long, and stage 1 must be one update stale in it."""
    orders = parse(
        "0F0 0F1 0F2 0B0 0U0 0F3 0B1 0U1 0B2 0U2 0B3 0U3",
        "1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2 1F3 1B3 1U3",
        "2F0 2B0 2U0 2F1 2B1 2U1 2F2 2B2 2U2 2F3 2B3 2U3",
    )
    reason = "its staleness is 0 updates, at least floor(W/K) = 1 is steady state"
    assert_rejected(rejection(orders, 1), "stage 1, position 3, 1F1", reason)


@pytest.mark.parametrize("first_update", [0, 5])
def test_a_flush_that_does_not_happen_is_rejected(first_update: int) -> None:
    orders = segment_orders(2, 2, 2, first_update)
    check_orders(orders, 2, flush_every=2)
    cell = f"0F{2 * first_update + 2}"
    reason = f"it must wait for the flush after update {first_update} (flush_every=1)"
    assert_rejected(rejection(orders, 2, flush_every=1), f"stage 0, position 3, {cell}", reason)


def test_the_flush_is_every_n_updates() -> None:
    message = rejection(segment_orders(2, 1, 4), 1, flush_every=3)
    assert_rejected(message, "stage 0, position 7, 0F3", "it must wait for the flush after update 2 (flush_every=3)")


# Orders that the machine cannot run.


def test_an_activation_ring_that_is_too_small_is_rejected() -> None:
    reason = "no slot is free for the receive of the activation of microbatch 2: there are 2, for microbatches 0, 1"
    message = rejection(segment_orders(3, 4, 2), 4, activation_slots=[1, 2, 2])
    assert_rejected(message, "stage 1, position 1, 1F1", reason)


def test_a_gradient_ring_of_one_slot_is_rejected() -> None:
    """While B0 runs, the receive of the next gradient is already posted."""
    reason = "no slot is free for the receive of the gradient of microbatch 1: there are 1, for microbatches 0"
    message = rejection(segment_orders(2, 2, 1), 2, gradient_slots=1)
    assert_rejected(message, "stage 0, position 2, 0B0", reason)


def test_an_evaluation_needs_two_slots() -> None:
    orders = parse("0F0 0F1 0F2", "1F0 1F1 1F2")
    check_orders(orders, 1, activation_slots=[1, 2])
    reason = "no slot is free for the receive of the activation of microbatch 1: there are 1, for microbatches 0"
    assert_rejected(rejection(orders, 1, activation_slots=[2, 1]), "stage 1, position 0, 1F0", reason)


def test_a_circle_of_waits_is_a_deadlock() -> None:
    """Stage 1 wants microbatch 1 before it returns the gradient that stage 0 wants before it sends microbatch 1."""
    orders = parse("0F0 0B0 0F1 0B1 0U0", "1F0 1F1 1B0 1B1 1U0", "2F0 2B0 2F1 2B1 2U0")
    message = rejection(orders, 2)
    assert_rejected(message, "stage 0, position 1, 0B0", "deadlock, no stage can go on:")
    assert message.splitlines()[1:4] == [
        "0B0 waits for the gradient of microbatch 0 from stage 1",
        "1F1 waits for the activation of microbatch 1 from stage 0",
        "2F1 waits for the activation of microbatch 1 from stage 1",
    ]


def eager_first_stage(stages: int, microbatches: int) -> list[list[Action]]:
    """Stage 0 runs all forwards first; the others run one microbatch at a time."""
    first = [f"0F{i}" for i in range(microbatches)] + [f"0B{i}" for i in range(microbatches)]
    others = [" ".join(f"{s}F{i} {s}B{i}" for i in range(microbatches)) for s in range(1, stages)]
    return parse(*(f"{row} {s}U0" for s, row in enumerate([" ".join(first), *others])))


@pytest.mark.parametrize("send_slots", [1, 2, 3, 4])
def test_too_few_send_buffers_are_a_deadlock(send_slots: int) -> None:
    """Stage 0 takes no gradient before its forwards are done, so stage 1 can send only `send_slots` of them.

    It stops in B of microbatch `send_slots`, having posted the receive of the activation after that. Stage 0 can send
    `send_slots` more than were posted.
    """
    enough = 2 * send_slots + 2
    check_orders(eager_first_stage(enough, enough), enough, send_slots=send_slots)
    message = rejection(eager_first_stage(enough + 1, enough + 1), enough + 1, send_slots=send_slots)
    place = f"stage 0, position {enough}, 0F{enough}"
    assert_rejected(message, place, "deadlock, no stage can go on:")
    lines = message.splitlines()
    assert lines[1] == (
        f"0F{enough} waits for a send buffer, until stage 1 posts the receive of the activation "
        f"of microbatch {send_slots + 2}"
    )
    assert lines[2] == (
        f"1B{send_slots} waits for a send buffer, until stage 0 posts the receive of the gradient of microbatch 0"
    )


def test_there_are_two_send_buffers_by_default() -> None:
    check_orders(eager_first_stage(6, 6), 6)
    assert "0F6 waits for a send buffer" in rejection(eager_first_stage(7, 7), 7)


def test_one_send_buffer_is_enough_for_segments() -> None:
    for stages in range(1, 7):
        for microbatches in range(1, 7):
            check_orders(segment_orders(stages, microbatches, 3), microbatches, send_slots=1)


# Arguments and messages.


@pytest.mark.parametrize(
    ("orders", "microbatches", "options", "message"),
    [
        ([], 1, {}, "stages must be at least 1, got 0"),
        ([[], []], 1, {}, "actions must be at least 1, got 0"),
        (parse(*BASE), 0, {}, "microbatches per update must be at least 1, got 0"),
        (parse(*BASE), 2, {"flush_every": 0}, "flush_every must be at least 1, got 0"),
        (parse(*BASE), 2, {"activation_slots": [2, 0]}, "activation slots must be at least 1, got 0"),
        (parse(*BASE), 2, {"activation_slots": [2]}, "1 activation rings were given for 2 stages"),
        (parse(*BASE), 2, {"gradient_slots": 0}, "gradient slots must be at least 1, got 0"),
        (parse(*BASE), 2, {"send_slots": 0}, "send slots must be at least 1, got 0"),
    ],
)
def test_arguments_out_of_range(
    orders: list[list[Action]], microbatches: int, options: dict[str, object], message: str
) -> None:
    assert rejection(orders, microbatches, **options) == message


def test_the_message_shows_the_grid_of_all_stages() -> None:
    assert rejection(parse("0F0 0B0 0F1 0B1 0U0", "1F0 1B0 1U0 1F1 1B1"), 2) == "\n".join(
        [
            "stage 1, position 2, 1U0: too early: the backward of microbatch 1 has not run",
            "stage 0  0F0  0B0  0F1  0B1  0U0",
            "stage 1  1F0  1B0 >1U0< 1F1  1B1",
        ]
    )


def test_the_report_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        check_segment(2, 2, 2).stages[0].staleness[0] = 1  # type: ignore[index]
