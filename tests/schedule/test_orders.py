import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapipe.errors import ScheduleError
from adapipe.schedule.actions import Action, Kind, format_order
from adapipe.schedule.orders import SegmentOrder, evaluation_order, segment_order, segment_orders

stages_, microbatches_, updates_ = st.integers(1, 12), st.integers(1, 16), st.integers(1, 8)


def indices(order: list[Action], kind: Kind) -> list[int]:
    return [action.index for action in order if action.kind is kind]


def textbook_1f1b(stage: int, stages: int, microbatches: int) -> str:
    """PipeDream-Flush as published: warm-up, one forward one backward, cool-down, update."""
    warm_up = min(stages - stage - 1, microbatches)
    cells = [f"{stage}F{i}" for i in range(warm_up)]
    for i in range(microbatches - warm_up):
        cells += [f"{stage}F{warm_up + i}", f"{stage}B{i}"]
    cells += [f"{stage}B{i}" for i in range(microbatches - warm_up, microbatches)]
    return " ".join([*cells, f"{stage}U0"])


def test_the_example_of_the_module() -> None:
    assert [format_order(order) for order in segment_orders(3, 2, 2)] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0U0 0B2 0B3 0U1",
        "1F0 1F1 1B0 1F2 1B1 1U0 1F3 1B2 1B3 1U1",
        "2F0 2B0 2F1 2B1 2U0 2F2 2B2 2F3 2B3 2U1",
    ]


@given(stages_, microbatches_, updates_, st.integers(0, 5))
@settings(deadline=None)
def test_structure(stages: int, microbatches: int, updates: int, first_update: int) -> None:
    first, total = first_update * microbatches, updates * microbatches
    for stage, order in enumerate(segment_orders(stages, microbatches, updates, first_update)):
        assert {action.stage for action in order} == {stage}
        assert indices(order, Kind.FORWARD) == list(range(first, first + total))
        assert indices(order, Kind.BACKWARD) == list(range(first, first + total))
        assert indices(order, Kind.UPDATE) == list(range(first_update, first_update + updates))

        kinds = [action.kind for action in order]
        for update in indices(order, Kind.UPDATE):
            before = order[order.index(Action(stage, Kind.UPDATE, update)) - 1]
            assert before == Action(stage, Kind.BACKWARD, (update + 1) * microbatches - 1)

        moves = [kind for kind in kinds if kind is not Kind.UPDATE]
        warm_up = min(stages - 1 - stage, total)
        steady = total - warm_up
        assert moves[:warm_up] == [Kind.FORWARD] * warm_up
        assert moves[warm_up : warm_up + 2 * steady] == [Kind.FORWARD, Kind.BACKWARD] * steady
        assert moves[warm_up + 2 * steady :] == [Kind.BACKWARD] * warm_up


@given(stages_, microbatches_)
def test_one_update_is_1f1b(stages: int, microbatches: int) -> None:
    for stage in range(stages):
        order = format_order(segment_order(stage, stages, microbatches, 1))
        assert order == textbook_1f1b(stage, stages, microbatches)


@given(stages_, microbatches_, updates_, st.integers(0, 5))
@settings(deadline=None)
def test_first_update_only_renumbers(stages: int, microbatches: int, updates: int, first_update: int) -> None:
    for stage in range(stages):
        shift = {
            Kind.FORWARD: first_update * microbatches,
            Kind.BACKWARD: first_update * microbatches,
            Kind.UPDATE: first_update,
        }
        from_zero = segment_order(stage, stages, microbatches, updates)
        moved = [Action(stage, action.kind, action.index + shift[action.kind]) for action in from_zero]
        assert list(segment_order(stage, stages, microbatches, updates, first_update)) == moved


@given(stages_, microbatches_, updates_)
@settings(deadline=None)
def test_the_last_stage_does_not_see_the_mode(stages: int, microbatches: int, updates: int) -> None:
    """It has no warm-up, so segments of one update, one after the other, are its order of one long segment."""
    last = stages - 1
    short = [action for u in range(updates) for action in segment_order(last, stages, microbatches, 1, u)]
    assert short == list(segment_order(last, stages, microbatches, updates))


@given(stages_, microbatches_, updates_, st.integers(0, 3), st.data())
@settings(deadline=None)
def test_a_segment_ended_early_is_the_shorter_segment(
    stages: int, microbatches: int, updates: int, first_update: int, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, stages - 1))
    end = first_update + data.draw(st.integers(1, updates))
    shorter = list(segment_order(stage, stages, microbatches, end - first_update, first_update))
    issued = data.draw(st.integers(0, len(shorter)))
    order = SegmentOrder(stage, stages, microbatches, first_update, updates)
    actions = iter(order)
    given_actions = [next(actions) for _ in range(issued)]
    forwards = indices(given_actions, Kind.FORWARD)
    if forwards and forwards[-1] >= end * microbatches:
        with pytest.raises(ScheduleError, match=f"has already run the forward of microbatch {forwards[-1]}$"):
            order.end_at(end)
        assert order.end_update == first_update + updates, "a refused end changes nothing"
        return
    order.end_at(end)
    assert order.end_microbatch == end * microbatches
    assert given_actions + list(actions) == shorter


def test_a_segment_cannot_end_before_a_forward_it_gave() -> None:
    order = SegmentOrder(stage=0, stages=3, microbatches=2, first_update=5, updates=4)
    actions = iter(order)
    assert [str(next(actions)) for _ in range(3)] == ["0F10", "0F11", "0F12"]
    with pytest.raises(
        ScheduleError,
        match=r"^the segment cannot end at update 6: stage 0 has already run the forward of microbatch 12$",
    ):
        order.end_at(6)
    order.end_at(7)
    assert format_order(actions) == "0B10 0F13 0B11 0U5 0B12 0B13 0U6"


def test_a_segment_cannot_be_made_longer() -> None:
    order = SegmentOrder(stage=0, stages=3, microbatches=2, first_update=5, updates=4)
    order.end_at(8)
    with pytest.raises(ScheduleError, match=r"^a segment that ends at update 8 cannot end at 9$"):
        order.end_at(9)
    order.end_at(8)
    assert order.end_update == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stages": 0}, "stages must be at least 1, got 0"),
        ({"stage": -1}, "stage -1 does not exist in a pipeline of 3 stages"),
        ({"stage": 3}, "stage 3 does not exist in a pipeline of 3 stages"),
        ({"microbatches": 0}, "microbatches per update must be at least 1, got 0"),
        ({"updates": 0}, "updates must be at least 1, got 0"),
        ({"first_update": -1}, "first update must be at least 0, got -1"),
        ({"in_flight": 0}, "microbatches in flight per hop must be at least 1, got 0"),
    ],
)
def test_arguments_that_make_no_segment(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{message}$"):
        segment_order(**({"stage": 0, "stages": 3, "microbatches": 2, "updates": 1} | arguments))


def test_an_evaluation_runs_forwards_only() -> None:
    assert format_order(evaluation_order(1, 3)) == "1F0 1F1 1F2"
