"""The checker: proves the orders of all stages without tensors.

It raises ScheduleError at the first broken rule, with the grid of all stages and the failing cell marked:

  each stage   F(i) once, B(i) once and later, U(u) after exactly the K backwards of update u, no U left out;
               at most P - s microbatches in flight and 1 + ceil((P-1-s)/K) weight versions
  each edge    both ends name the same microbatches in the same order, since an edge is a FIFO
  staleness    at most ceil((P-1-s)/K); in steady state at least floor((P-1-s)/K); none across a flush
  each ring    no receive is posted into a slot whose microbatch is still needed
  progress     the orders run to their end on the machine below: no deadlock

The machine: activations go down, from F(i) on stage s to F(i) on s+1; gradients go up, from B(i) to B(i) on
s-1. A stage takes message k of an edge, posts the receive of message k+1, computes, and sends. It posts the first
receive of an edge when it comes to the action that needs it. A send is complete once the peer has posted the
matching receive; it does not block, but there are only `send_slots` buffers, so send k first waits until send
k - send_slots is complete.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import MappingProxyType
from typing import Literal, NoReturn

from adapipe.errors import ScheduleError
from adapipe.schedule.actions import Action, Kind
from adapipe.schedule.grid import format_grid
from adapipe.schedule.laws import in_flight_bound, staleness_bound, version_bound
from adapipe.schedule.orders import segment_orders

Orders = Sequence[Sequence[Action]]
Edge = tuple[int, int]  # sender and receiver, always neighbours
Step = Literal["post", "receive", "send"]  # "post" is the first receive of an edge; each "receive" posts the next


@dataclass(frozen=True, slots=True)
class StageReport:
    """What the checker found on one stage.

    `staleness` maps each microbatch, in the order of the forwards, to its staleness in updates. An evaluation
    (forwards only, on all stages) has no staleness, keeps nothing in flight, and reads one version.
    """

    staleness: Mapping[int, int]
    peak_in_flight: int
    peak_versions: int


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What the checker found, stage 0 first."""

    stages: tuple[StageReport, ...]


def check_orders(
    orders: Orders,
    microbatches: int,
    *,
    flush_every: int | None = None,
    activation_slots: Sequence[int] | None = None,
    gradient_slots: int = 2,
    send_slots: int = 2,
) -> CheckReport:
    """Prove the orders of all stages, `orders[s]` of stage s, with K = `microbatches` per update.

    A flush is where every stage runs update u - 1 before any forward of update u or later; it is found in the
    orders. `flush_every` = n demands one after every n updates; 1 means synchronous. `activation_slots` gives the
    ring of each stage, by default its in-flight bound + 1; `gradient_slots` is the ring of every stage for gradients,
    and `send_slots` the number of send buffers of every edge in each direction.

    Raises ScheduleError at the first broken rule.
    """
    if activation_slots is None:
        activation_slots = [in_flight_bound(s, len(orders)) + 1 for s in range(len(orders))]
    if len(activation_slots) != len(orders):
        raise ScheduleError(f"{len(activation_slots)} activation rings were given for {len(orders)} stages")
    for name, value in (
        ("stages", len(orders)),
        ("actions", sum(map(len, orders))),
        ("microbatches per update", microbatches),
        ("flush_every", 1 if flush_every is None else flush_every),
        ("activation slots", min(activation_slots, default=1)),
        ("gradient slots", gradient_slots),
        ("send slots", send_slots),
    ):
        if value < 1:
            raise ScheduleError(f"{name} must be at least 1, got {value}")

    training = any(action.kind is not Kind.FORWARD for order in orders for action in order)
    first_update = _first_update(orders, microbatches) if training else 0
    stages = [_check_stage(orders, s, microbatches, first_update, training) for s in range(len(orders))]
    for s in range(len(orders) - 1):
        _check_edge(orders, s, s + 1, Kind.FORWARD)
        _check_edge(orders, s + 1, s, Kind.BACKWARD)
    if training:
        _check_staleness(orders, stages, microbatches, first_update, flush_every)
    for s in range(len(orders)):
        if s > 0:
            freed_by = Kind.BACKWARD if training else Kind.FORWARD
            _check_ring(orders, s, Kind.FORWARD, freed_by, activation_slots[s])
        if s < len(orders) - 1:
            _check_ring(orders, s, Kind.BACKWARD, Kind.BACKWARD, gradient_slots)
    _check_progress(orders, send_slots)
    return CheckReport(tuple(stages))


def check_segment(stages: int, microbatches: int, updates: int, first_update: int = 0) -> CheckReport:
    """Prove the orders of one segment, with the default rings and send buffers."""
    return check_orders(segment_orders(stages, microbatches, updates, first_update), microbatches)


_MESSAGE = {Kind.FORWARD: "activation", Kind.BACKWARD: "gradient"}  # what an action receives and sends


def _fail(orders: Orders, stage: int, position: int, reason: str) -> NoReturn:
    """Raise ScheduleError for one cell."""
    grid = format_grid(orders, (stage, position))
    raise ScheduleError(f"stage {stage}, position {position}, {orders[stage][position]}: {reason}\n{grid}")


def _indices(order: Sequence[Action], kind: Kind) -> list[int]:
    """The microbatches (or updates) of one kind of action, in order."""
    return [action.index for action in order if action.kind is kind]


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
        _fail(orders, stage, position, reason)
    return first // microbatches


def _check_stage(orders: Orders, stage: int, microbatches: int, first_update: int, training: bool) -> StageReport:
    """Prove what concerns one stage alone: pairing, updates, and how much it holds."""
    most_in_flight = in_flight_bound(stage, len(orders))
    most_versions = version_bound(stage, len(orders), microbatches)
    backwards = set(_indices(orders[stage], Kind.BACKWARD))
    version = first_update  # the weights that the next forward reads; also the next update
    read: dict[int, int] = {}  # every microbatch -> the version its forward read
    in_flight: set[int] = set()
    held: Counter[int] = Counter()  # version -> how many microbatches in flight hold it
    accumulated: set[int] = set()  # backwards since the last update
    peak_in_flight, peak_versions = 0, 1
    for position, action in enumerate(orders[stage]):
        index = action.index
        if action.stage != stage:
            _fail(orders, stage, position, f"an action of stage {action.stage} in the row of stage {stage}")
        if action.kind is Kind.FORWARD:
            if index in read:
                _fail(orders, stage, position, f"the forward of microbatch {index} runs a second time")
            read[index] = version
            if training:
                if index not in backwards:
                    _fail(orders, stage, position, f"microbatch {index} has no backward")
                in_flight.add(index)
                held[version] += 1
                peak_in_flight = max(peak_in_flight, len(in_flight))
            if len(in_flight) > most_in_flight:
                reason = f"{len(in_flight)} microbatches in flight, at most P - s = {most_in_flight} is allowed"
                _fail(orders, stage, position, reason)
        elif action.kind is Kind.BACKWARD:
            if index not in read:
                _fail(orders, stage, position, f"the forward of microbatch {index} has not run before it")
            if index not in in_flight:
                _fail(orders, stage, position, f"the backward of microbatch {index} runs a second time")
            in_flight.remove(index)
            held[read[index]] -= 1
            if not held[read[index]]:
                del held[read[index]]
            accumulated.add(index)
        else:
            _check_update(orders, stage, position, version, accumulated, microbatches)
            accumulated.clear()
            version += 1
            peak_versions = max(peak_versions, len(held) + 1)
            if peak_versions > most_versions:
                reason = f"{peak_versions} weight versions, at most 1 + ceil((P-1-s)/K) = {most_versions} is allowed"
                _fail(orders, stage, position, reason)
    if accumulated:
        position = orders[stage].index(Action(stage, Kind.BACKWARD, min(accumulated)))
        _fail(orders, stage, position, f"no update follows; {min(accumulated) // microbatches} must apply it")
    staleness = {i: i // microbatches - v for i, v in read.items()} if training else {}
    return StageReport(MappingProxyType(staleness), peak_in_flight, peak_versions)


def _check_update(
    orders: Orders, stage: int, position: int, expected: int, accumulated: set[int], microbatches: int
) -> None:
    """Prove that an update is the next one and applies exactly its own microbatches."""
    update = orders[stage][position].index
    if update != expected:
        _fail(orders, stage, position, f"update {update} out of turn: the next is update {expected}")
    own = range(update * microbatches, (update + 1) * microbatches)
    if missing := [i for i in own if i not in accumulated]:
        _fail(orders, stage, position, f"too early: the backward of microbatch {missing[0]} has not run")
    if len(accumulated) > microbatches:
        late = min(i for i in accumulated if i not in own)
        _fail(orders, stage, position, f"too late: the backward of microbatch {late} belongs to another update")


def _check_edge(orders: Orders, sender: int, receiver: int, kind: Kind) -> None:
    """Prove that the k-th message sent is the k-th expected."""
    what = _MESSAGE[kind]
    sent, expected = _indices(orders[sender], kind), _indices(orders[receiver], kind)
    for found, wanted in zip_longest(sent, expected):
        if found == wanted:
            continue
        if wanted is None:
            position = orders[sender].index(Action(sender, kind, found))
            _fail(orders, sender, position, f"stage {receiver} never receives the {what} of microbatch {found}")
        got = f"the next on the edge from stage {sender} is {found}"
        if found is None:
            got = f"stage {sender} sends no more"
        position = orders[receiver].index(Action(receiver, kind, wanted))
        _fail(orders, receiver, position, f"expects the {what} of microbatch {wanted}, but {got}")


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
) -> None:
    """Prove the law of staleness, W = P-1-s: at most ceil(W/K), and in steady state at least floor(W/K).

    A segment lasts from one flush to the next, so a segment of one update has staleness 0. A microbatch is in
    steady state when at least W forwards of its segment ran before its own. In 1F1B, microbatch j of a segment,
    j >= W, runs forward after j - W backwards, so its staleness is floor(j/K) - floor((j-W)/K).
    """
    starts = _segment_starts(stages, microbatches, first_update)
    for stage, report in enumerate(stages):
        warm_up = len(orders) - 1 - stage
        least, most = warm_up // microbatches, staleness_bound(stage, len(orders), microbatches)
        for earlier, (i, staleness) in enumerate(report.staleness.items()):
            update = i // microbatches
            since_first = update - first_update
            in_segment = earlier - (starts[since_first] - first_update) * microbatches
            if flush_every is not None and staleness > since_first % flush_every:
                flush = update - since_first % flush_every
                reason = f"it must wait for the flush after update {flush - 1} (flush_every={flush_every})"
            elif staleness > most:
                reason = f"its staleness is {staleness} updates, at most ceil((P-1-s)/K) = {most} is allowed"
            elif in_segment >= warm_up and staleness < least:
                reason = f"its staleness is {staleness} updates, at least floor((P-1-s)/K) = {least} is steady state"
            else:
                continue
            _fail(orders, stage, orders[stage].index(Action(stage, Kind.FORWARD, i)), reason)


def _check_ring(orders: Orders, stage: int, received_by: Kind, freed_by: Kind, slots: int) -> None:
    """Prove that no receive is posted into a slot in use. Message k of the edge goes to slot k mod `slots`."""
    arrivals = _indices(orders[stage], received_by)
    slot_of = {i: k % slots for k, i in enumerate(arrivals)}
    holder = {slot_of[i]: i for i in arrivals[:1]}  # slot -> the microbatch that needs it
    received = 0
    for position, action in enumerate(orders[stage]):
        if action.kind is received_by:
            received += 1
            for following in arrivals[received : received + 1]:
                slot = slot_of[following]
                if slot in holder:
                    reason = f"slot overwritten: the receive of the {_MESSAGE[received_by]} of microbatch {following}"
                    reason += f" goes into slot {slot} of {slots}, which microbatch {holder[slot]} still needs"
                    _fail(orders, stage, position, reason)
                holder[slot] = following
        if action.kind is freed_by:
            del holder[slot_of[action.index]]


def _steps(order: Sequence[Action], stage: int, stages: int) -> Iterator[tuple[int, Step, Edge]]:
    """What a stage does on its edges: the position of the action, the step, the edge."""
    opened: set[Edge] = set()
    for position, action in enumerate(order):
        if action.kind is Kind.UPDATE:
            continue
        direction = 1 if action.kind is Kind.FORWARD else -1
        source, target = stage - direction, stage + direction
        if 0 <= source < stages:
            edge = source, stage
            if edge not in opened:
                opened.add(edge)
                yield position, "post", edge
            yield position, "receive", edge
        if 0 <= target < stages:
            yield position, "send", (stage, target)


def _check_progress(orders: Orders, send_slots: int) -> None:
    """Run all orders to their end.

    Counting is enough, for both ends of an edge agree on the messages. No step disables another, so the order in
    which the stages get their turn does not matter.
    """
    stages = len(orders)
    done: Counter[tuple[Step, Edge]] = Counter()

    def possible(step: Step, edge: Edge) -> bool:
        sent, received = done["send", edge], done["receive", edge]
        if step == "send":
            return sent < done["post", edge] + received + send_slots
        return step == "post" or received < sent

    def wait(position: int, step: Step, edge: Edge) -> str:
        sender, receiver = edge
        kind = Kind.FORWARD if sender < receiver else Kind.BACKWARD
        messages = _indices(orders[sender], kind)
        if step == "receive":
            message = f"{_MESSAGE[kind]} of microbatch {messages[done[step, edge]]}"
            return f"{orders[receiver][position]} waits for the {message} from stage {sender}"
        message = f"{_MESSAGE[kind]} of microbatch {messages[done[step, edge] - send_slots]}"
        cell = orders[sender][position]
        return f"{cell} waits for a send buffer, until stage {receiver} posts the receive of the {message}"

    left = [deque(_steps(order, s, stages)) for s, order in enumerate(orders)]
    turns = deque(range(stages))
    while turns:
        stage = turns.popleft()
        before = len(left[stage])
        while left[stage] and possible(*left[stage][0][1:]):
            done[left[stage].popleft()[1:]] += 1
        if len(left[stage]) < before:  # only the neighbours can have waited for that
            turns.extend(s for s in (stage - 1, stage + 1) if 0 <= s < stages)
    blocked = {s: steps[0] for s, steps in enumerate(left) if steps}
    if blocked:
        stage = min(blocked)
        waits = "\n".join(wait(*step) for step in blocked.values())
        _fail(orders, stage, blocked[stage][0], f"deadlock, no stage can go on:\n{waits}")
