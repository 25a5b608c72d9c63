from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapipe.errors import ScheduleError
from adapipe.schedule import SYNC_SCHEDULES, check_synchronous, format_order, segment_orders, sync_schedule
from adapipe.schedule.cost import CostModel, LinkCost, StageCost, equal_stages
from adapipe.schedule.csv_file import parse_schedule, read_schedule, schedule_csv
from adapipe.schedule.plan import fair_schedules, fastest_schedule
from adapipe.schedule.table import table_of, update_table

names = st.sampled_from(SYNC_SCHEDULES)
stages_, microbatches_, in_flight_ = st.integers(1, 10), st.integers(1, 16), st.integers(1, 3)


def test_the_orders_of_the_pictures() -> None:
    assert [format_order(order) for order in sync_schedule("gpipe", 2, 3).orders] == [
        "0F0 0F1 0F2 0B0 0B1 0B2 0U0",
        "1F0 1F1 1F2 1B0 1B1 1B2 1U0",
    ]
    assert [list(order) for order in sync_schedule("1f1b", 3, 4).orders] == segment_orders(3, 4, 1)
    assert [format_order(order) for order in sync_schedule("zb-h1", 3, 6).orders] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0F5 0B3 0B4 0B5 0U0",
        "1F0 1F1 1I0 1F2 1B1 1F3 1B2 1F4 1B3 1F5 1I4 1W0 1I5 1W4 1W5 1U0",
        "2F0 2I0 2F1 2I1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2I5 2W0 2W1 2W5 2U0",
    ]
    # With few microbatches all are split.
    assert format_order(sync_schedule("zb-h1", 3, 2).orders[1]) == "1F0 1F1 1I0 1I1 1W0 1W1 1U0"


@settings(deadline=None)
@given(names, stages_, microbatches_, in_flight_)
def test_every_schedule_is_proved(name: str, stages: int, microbatches: int, in_flight: int) -> None:
    schedule = sync_schedule(name, stages, microbatches, in_flight)
    report, buffers = check_synchronous(schedule, in_flight)
    most = max(figures.peak_in_flight for figures in report.stages)
    assert most == min(microbatches, microbatches if name == "gpipe" else 1 + in_flight * (stages - 1))
    for s, (figures, of_stage) in enumerate(zip(report.stages, buffers, strict=True)):
        assert set(figures.staleness.values()) == {0}
        assert figures.peak_versions == 1
        assert of_stage.sends == 1 + in_flight
        assert of_stage.activations <= microbatches
        assert figures.peak_parked <= (1 + in_flight * s if name == "zb-h1" and s else 0)


@settings(deadline=None)
@given(names, stages_, microbatches_, in_flight_)
def test_tables_are_the_orders(name: str, stages: int, microbatches: int, in_flight: int) -> None:
    table = update_table(name, stages, microbatches, in_flight)
    expected = table_of(sync_schedule(name, stages, microbatches, in_flight).orders)
    assert np.array_equal(table.kinds, expected.kinds)
    assert np.array_equal(table.indices, expected.indices)


def test_a_schedule_that_does_not_exist() -> None:
    with pytest.raises(ScheduleError, match="there is no synchronous schedule 'zb-h2': there are gpipe, 1f1b, zb-h1"):
        sync_schedule("zb-h2", 2, 2)


# -- choosing ------------------------------------------------------------------------------------------------------


def test_the_fastest_for_the_costs() -> None:
    assert fastest_schedule(equal_stages(4, 1, 2), 8)[0] == "zb-h1"
    # Where the halves cost more than the whole, splitting loses.
    dear = CostModel((StageCost(1, 2, 0, 1.6, 1.6),) * 4, (LinkCost(),) * 3)
    best, seconds = fastest_schedule(dear, 8)
    assert best == "1f1b" == min(seconds, key=lambda name: seconds[name])
    # Without a bubble there is nothing to gain.
    assert fastest_schedule(equal_stages(1, 1, 2), 8)[0] == "1f1b"


def test_gpipe_is_a_choice_where_it_holds_no_more() -> None:
    assert fair_schedules(4, 4) == ("1f1b", "zb-h1", "gpipe")
    assert fair_schedules(4, 5) == ("1f1b", "zb-h1")


# -- files ---------------------------------------------------------------------------------------------------------


@given(names, stages_, microbatches_)
@settings(deadline=None)
def test_a_file_is_its_schedule(name: str, stages: int, microbatches: int) -> None:
    schedule = sync_schedule(name, stages, microbatches)
    assert parse_schedule(schedule_csv(schedule), name) == schedule


def test_what_torch_writes_is_read_and_the_other_way_round(tmp_path: Path) -> None:
    from torch.distributed.pipelining.schedules import _Action, _ComputationType

    schedule = sync_schedule("zb-h1", 3, 4)
    for row, order in zip(schedule_csv(schedule).splitlines(), schedule.orders, strict=True):
        for cell, action in zip(row.split(","), order, strict=False):
            theirs = _Action.from_str(cell)
            assert theirs is not None
            assert (theirs.stage_index, theirs.microbatch_index) == (action.stage, action.index)
            assert _ComputationType.from_str(action.kind.value) == theirs.computation_type
    path = tmp_path / "idle.csv"
    path.write_text("0F0,0F1,,,0B0,0B1\n,1F0,1I0,1F1,1W0,1I1,1W1\n")
    check_synchronous(read_schedule(path))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it holds no cell"),
        ("\n\n", "it holds no cell"),
        ("0F0,0B0\n\n2F0,2B0\n", "line 2: stage 1 has no action"),
        ("0F0,0B0\n1F0,1X0\n", "line 2, cell 2: '1X0' is not an action"),
        ("0F0, 0B0\n", "line 1, cell 2: ' 0B0' is not an action"),
        ("0F0,0B0\n0F0,0B0\n", "line 2, cell 1: 0F0 is of stage 0, and the line is that of stage 1"),
        ("0F0,0B0,0U0\n", "line 1, cell 3: 0U0: leave the update out"),
        ("0F0,0SEND_F0,0B0\n", "line 1, cell 2: '0SEND_F0' is not computing"),
    ],
)
def test_a_file_that_is_none(text: str, says: str) -> None:
    with pytest.raises(ScheduleError) as error:
        parse_schedule(text, "some.csv")
    assert str(error.value).startswith(says)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0B0,0F1,0B1\n1F0,1B0\n", "too early: the backward of microbatch 1 has not run"),
        ("0F0,0B0\n1B0,1F0\n", "the forward of microbatch 0 has not run before it"),
        ("0F0,0I0\n1F0,1B0\n", "too early: the backward of microbatch 0 has not run"),
        ("0F0,0I0,0W0\n1F0,1W0,1I0\n", "the input gradient of microbatch 0 has not been made before it"),
        ("0F0,0I0,0B0,0W0\n1F0,1B0\n", "the backward of microbatch 0 runs a second time"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "deadlock, no stage can go on"),
        ("0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1\n", "expects the activation of microbatch 1"),
        ("0F1,0B1\n", "too early: the backward of microbatch 0 has not run"),
    ],
)
def test_a_file_that_cannot_run(text: str, says: str) -> None:
    with pytest.raises(ScheduleError) as error:
        check_synchronous(parse_schedule(text, "some.csv"))
    assert says in str(error.value)


def test_a_schedule_that_needs_more_send_buffers_gets_them() -> None:
    """Stage 0 takes no gradient before its last forward; stage 1 answers at once."""
    eager = "".join(f"1F{i},1B{i}," for i in range(8)).rstrip(",")
    late = ",".join([*(f"0F{i}" for i in range(8)), *(f"0B{i}" for i in range(8))])
    _, buffers = check_synchronous(parse_schedule(f"{late}\n{eager}\n", "late.csv"))
    assert [of_stage.sends for of_stage in buffers] == [8, 8]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"none\.csv cannot be read"):
        read_schedule(tmp_path / "none.csv")
    path = tmp_path / "bytes.csv"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ScheduleError, match=r"bytes\.csv is not a text"):
        read_schedule(path)
