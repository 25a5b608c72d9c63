"""The checker: proves the orders of all stages without tensors.

It raises ScheduleError at the first broken rule, with the grid of all stages and the failing cell marked:

  each stage   F(i) once, later B(i) once, or I(i) once and later W(i) once; U(u) after exactly the K backwards of
               update u, no U left out; at most 1 + W microbatches in flight and 1 + ceil(W/K) weight versions
  each edge    both ends name the same microbatches in the same order, since an edge is a FIFO
  staleness    at most ceil(W/K); in steady state at least floor(W/K); none across a flush
  each ring    there is a free slot for every receive that is posted
  progress     the orders run to their end on the machine of `adapipe.schedule.machine`: no deadlock

W = h * (P-1-s) is how far stage s runs ahead, with h microbatches in flight per hop; P-1-s in 1F1B. A synchronous
schedule may have all K microbatches in flight; it is given the buffers that it turns out to need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import MappingProxyType

from adapipe.errors import ScheduleError
from adapipe.schedule import laws
from adapipe.schedule.actions import Action, Kind
from adapipe.schedule.buffers import Buffers, update_buffers
from adapipe.schedule.grid import fail
from adapipe.schedule.machine import MESSAGE, Orders, check_progress, check_ring, taken
from adapipe.schedule.orders import segment_orders
from adapipe.schedule.synchronous import SyncSchedule


@dataclass(frozen=True, slots=True)
class StageReport:
    """What the checker found on one stage.

    `staleness` maps each microbatch, in the order of the forwards, to its staleness in updates. An evaluation
    (forwards only, on all stages) has no staleness, keeps nothing in flight, and reads one version. A microbatch is in
    flight until its backward is complete; it is parked between the halves of its backward.
    """

    staleness: Mapping[int, int]
    peak_in_flight: int
    peak_versions: int
    peak_parked: int = 0


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What the checker found, stage 0 first."""

    stages: tuple[StageReport, ...]


def check_orders(
    orders: Orders,
    microbatches: int,
    *,
    flush_every: int | None = None,
    in_flight: int = 1,
    activation_slots: Sequence[int] | None = None,
    gradient_slots: int | None = None,
    send_slots: int | None = None,
) -> CheckReport:
    """Prove the orders of all stages, `orders[s]` of stage s, with K = `microbatches` per update.

    A flush is where every stage runs update u - 1 before any forward of update u or later; it is found in the
    orders. `flush_every` = n demands one after every n updates; 1 means synchronous. `in_flight` is h, the microbatches
    in flight per hop. `activation_slots` gives the ring of each stage, `gradient_slots` the ring of every stage for
    gradients, `send_slots` the number of send buffers of every edge in each direction; by default those of the laws.

    Raises ScheduleError at the first broken rule.
    """
    warm_ups = [laws.warm_up(s, len(orders), in_flight) for s in range(len(orders))]
    if activation_slots is None:
        activation_slots = [laws.activation_slots(warm_up, in_flight) for warm_up in warm_ups]
    gradient_slots = laws.gradient_slots(in_flight) if gradient_slots is None else gradient_slots
    send_slots = laws.send_slots(in_flight) if send_slots is None else send_slots
    if len(activation_slots) != len(orders):
        raise ScheduleError(f"{len(activation_slots)} activation rings were given for {len(orders)} stages")
    for name, value in (
        ("stages", len(orders)),
        ("actions", sum(map(len, orders))),
        ("microbatches per update", microbatches),
        ("microbatches in flight per hop", in_flight),
        ("flush_every", 1 if flush_every is None else flush_every),
        ("activation slots", min(activation_slots, default=1)),
        ("gradient slots", gradient_slots),
        ("send slots", send_slots),
    ):
        if value < 1:
            raise ScheduleError(f"{name} must be at least 1, got {value}")

    ahead = laws.receives_ahead(in_flight)
    training = any(action.kind is not Kind.FORWARD for order in orders for action in order)
    first_update = _first_update(orders, microbatches) if training else 0
    stages = [
        _check_stage(
            orders,
            s,
            microbatches,
            first_update,
            training,
            most_in_flight=laws.in_flight_bound(warm_ups[s]),
            most_versions=laws.version_bound(warm_ups[s], microbatches),
        )
        for s in range(len(orders))
    ]
    for s in range(len(orders) - 1):
        _check_edge(orders, s, s + 1, Kind.FORWARD)
        _check_edge(orders, s + 1, s, Kind.BACKWARD)
    if training:
        _check_staleness(orders, stages, microbatches, first_update, flush_every, warm_ups)
    for s in range(len(orders)):
        if s > 0:
            check_ring(orders, s, Kind.FORWARD, training, activation_slots[s], ahead)
        if s < len(orders) - 1:
            check_ring(orders, s, Kind.BACKWARD, training, gradient_slots, ahead)
    check_progress(orders, send_slots, ahead)
    return CheckReport(tuple(stages))


def check_synchronous(schedule: SyncSchedule, in_flight: int = 1) -> tuple[CheckReport, list[Buffers]]:
    """Prove the orders of a synchronous schedule, and say which buffers every stage needs for them.

    A send has as many buffers as the laws say, or, where the orders could not go on with those, one per microbatch.
    Raises ScheduleError at the first broken rule.
    """
    orders, microbatches = schedule.orders, schedule.microbatches
    ahead = laws.receives_ahead(in_flight)
    reports = [
        _check_stage(orders, s, microbatches, 0, True, most_in_flight=microbatches, most_versions=1)
        for s in range(len(orders))
    ]
    for s, order in enumerate(orders):
        if order[-1:] != (Action(s, Kind.UPDATE, 0),) or len(reports[s].staleness) != microbatches:
            raise ScheduleError(
                f"stage {s} must run microbatches 0 to {microbatches - 1}, each once, and then update 0"
            )
    for s in range(len(orders) - 1):
        _check_edge(orders, s, s + 1, Kind.FORWARD)
        _check_edge(orders, s + 1, s, Kind.BACKWARD)
    sends = laws.send_slots(in_flight)
    try:
        check_progress(orders, sends, ahead)
    except ScheduleError:
        sends = max(sends, microbatches)
        check_progress(orders, sends, ahead)
    buffers = [
        replace(update_buffers(r.peak_in_flight, r.peak_parked, microbatches, in_flight), sends=sends) for r in reports
    ]
    for s in range(len(orders)):
        if s > 0:
            check_ring(orders, s, Kind.FORWARD, True, buffers[s].activations, ahead)
        if s < len(orders) - 1:
            check_ring(orders, s, Kind.BACKWARD, True, buffers[s].gradients, ahead)
    return CheckReport(tuple(reports)), buffers


def check_segment(
    stages: int, microbatches: int, updates: int, first_update: int = 0, in_flight: int = 1
) -> CheckReport:
    """Prove the orders of one segment, with the default rings and send buffers."""
    orders = segment_orders(stages, microbatches, updates, first_update, in_flight)
    return check_orders(orders, microbatches, in_flight=in_flight)


def _first_update(orders: Orders, microbatches: int) -> int:
    """The update that the first microbatch of the orders belongs to."""
    microbatch_cells = (
        (action.index, stage, position)
        for stage, order in enumerate(orders)
        for position, action in enumerate(order)
        if action.kind is not Kind.UPDATE
    )
    first, stage, position = min(microbatch_cells, default=(0, 0, 0))
    if first % microbatches:
        reason = f"the first microbatch must begin an update, so be a multiple of {microbatches}"
        fail(orders, stage, position, reason)
    return first // microbatches


def _check_stage(
    orders: Orders,
    stage: int,
    microbatches: int,
    first_update: int,
    training: bool,
    *,
    most_in_flight: int,
    most_versions: int,
) -> StageReport:
    """Prove what concerns one stage alone: pairing, updates, and how much it holds."""
    backwards = {microbatch for _, microbatch in taken(orders[stage], Kind.BACKWARD)}
    version = first_update  # the weights that the next forward reads; also the next update
    read: dict[int, int] = {}  # every microbatch -> the version its forward read
    in_flight: set[int] = set()
    held: Counter[int] = Counter()  # version -> how many microbatches in flight hold it
    parked: set[int] = set()  # I has run, W has not
    accumulated: set[int] = set()  # complete since the last update
    peak_in_flight, peak_versions, peak_parked = 0, 1, 0
    for position, action in enumerate(orders[stage]):
        index = action.index
        if action.stage != stage:
            fail(orders, stage, position, f"an action of stage {action.stage} in the row of stage {stage}")
        if action.kind is Kind.FORWARD:
            if index in read:
                fail(orders, stage, position, f"the forward of microbatch {index} runs a second time")
            read[index] = version
            if training:
                if index not in backwards:
                    fail(orders, stage, position, f"microbatch {index} has no backward")
                in_flight.add(index)
                held[version] += 1
                peak_in_flight = max(peak_in_flight, len(in_flight))
            if len(in_flight) > most_in_flight:
                reason = f"{len(in_flight)} microbatches in flight, at most 1 + W = {most_in_flight} is allowed"
                fail(orders, stage, position, reason)
            continue
        if action.kind.answers:
            if index not in read:
                fail(orders, stage, position, f"the forward of microbatch {index} has not run before it")
            if index not in in_flight or index in parked:
                fail(orders, stage, position, f"the backward of microbatch {index} runs a second time")
            parked.add(index)
        if action.kind.completes:
            if index not in parked:
                fail(orders, stage, position, f"the input gradient of microbatch {index} has not been made before it")
            parked.remove(index)
            in_flight.remove(index)
            held[read[index]] -= 1
            if not held[read[index]]:
                del held[read[index]]
            accumulated.add(index)
        peak_parked = max(peak_parked, len(parked))
        if action.kind is Kind.UPDATE:
            _check_update(orders, stage, position, version, accumulated, microbatches)
            accumulated.clear()
            version += 1
            peak_versions = max(peak_versions, len(held) + 1)
            if peak_versions > most_versions:
                reason = f"{peak_versions} weight versions, at most 1 + ceil(W/K) = {most_versions} is allowed"
                fail(orders, stage, position, reason)
    for position, action in enumerate(orders[stage]):
        if action.index in parked and action.kind.answers:
            fail(orders, stage, position, f"the weight gradients of microbatch {action.index} are never made")
        if action.index in accumulated and action.kind.completes:
            fail(orders, stage, position, f"no update follows; {action.index // microbatches} must apply it")
    staleness = {i: i // microbatches - v for i, v in read.items()} if training else {}
    return StageReport(MappingProxyType(staleness), peak_in_flight, peak_versions, peak_parked)


def _check_update(
    orders: Orders, stage: int, position: int, expected: int, accumulated: set[int], microbatches: int
) -> None:
    """Prove that an update is the next one and applies exactly its own microbatches."""
    update = orders[stage][position].index
    if update != expected:
        fail(orders, stage, position, f"update {update} out of turn: the next is update {expected}")
    own = range(update * microbatches, (update + 1) * microbatches)
    if missing := [i for i in own if i not in accumulated]:
        fail(orders, stage, position, f"too early: the backward of microbatch {missing[0]} has not run")
    if len(accumulated) > microbatches:
        late = min(i for i in accumulated if i not in own)
        fail(orders, stage, position, f"too late: the backward of microbatch {late} belongs to another update")


def _check_edge(orders: Orders, sender: int, receiver: int, kind: Kind) -> None:
    """Prove that the k-th message sent is the k-th expected."""
    what = MESSAGE[kind]
    for sent, expected in zip_longest(taken(orders[sender], kind), taken(orders[receiver], kind)):
        if expected is None:
            position, found = sent
            fail(orders, sender, position, f"stage {receiver} never receives the {what} of microbatch {found}")
        position, wanted = expected
        if sent is None:
            got = f"stage {sender} sends no more"
        elif sent[1] != wanted:
            got = f"the next on the edge from stage {sender} is {sent[1]}"
        else:
            continue
        fail(orders, receiver, position, f"expects the {what} of microbatch {wanted}, but {got}")


def _segment_starts(stages: Sequence[StageReport], microbatches: int, first_update: int) -> list[int]:
    """For every update, the update that its segment begins with.

    An update begins a segment when none of its forwards is stale, on any stage. That is enough because forwards run
    update by update: the last stage holds one microbatch at a time, so all orders follow its backwards and updates.
    """
    stale = {i // microbatches for report in stages for i, staleness in report.staleness.items() if staleness}
    starts: list[int] = []
    for update in range(first_update, first_update + len(stages[0].staleness) // microbatches):
        starts.append(starts[-1] if update in stale else update)
    return starts


def _check_staleness(
    orders: Orders,
    stages: Sequence[StageReport],
    microbatches: int,
    first_update: int,
    flush_every: int | None,
    warm_ups: Sequence[int],
) -> None:
    """Prove the law of staleness: at most ceil(W/K), and in steady state at least floor(W/K).

    A segment lasts from one flush to the next, so a segment of one update has staleness 0. A microbatch is in
    steady state when at least W forwards of its segment ran before its own. In 1F1B, microbatch j of a segment,
    j >= W, runs forward after j - W backwards, so its staleness is floor(j/K) - floor((j-W)/K).
    """
    starts = _segment_starts(stages, microbatches, first_update)
    for stage, report in enumerate(stages):
        warm_up = warm_ups[stage]
        least, most = warm_up // microbatches, laws.staleness_bound(warm_up, microbatches)
        for earlier, (i, staleness) in enumerate(report.staleness.items()):
            update = i // microbatches
            since_first = update - first_update
            in_segment = earlier - (starts[since_first] - first_update) * microbatches
            if flush_every is not None and staleness > since_first % flush_every:
                flush = update - since_first % flush_every
                reason = f"it must wait for the flush after update {flush - 1} (flush_every={flush_every})"
            elif staleness > most:
                reason = f"its staleness is {staleness} updates, at most ceil(W/K) = {most} is allowed"
            elif in_segment >= warm_up and staleness < least:
                reason = f"its staleness is {staleness} updates, at least floor(W/K) = {least} is steady state"
            else:
                continue
            fail(orders, stage, orders[stage].index(Action(stage, Kind.FORWARD, i)), reason)
