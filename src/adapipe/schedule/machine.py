"""The machine that orders run on, without tensors: edges, receiving rings, send buffers.

The machine: activations go down, from F(i) on stage s to F(i) on s+1; gradients go up, from B(i) or I(i) to that of
s-1. A stage takes message k of an edge, posts the receive of message k + `ahead`, computes, and sends. It posts the
first `ahead` receives of an edge when it comes to the action that needs the first. A send is complete once the peer
has posted the matching receive; it does not block, but there are only `send_slots` buffers, so send k first waits until
send k - send_slots is complete.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Literal

from adapipe.schedule.actions import Action, Kind
from adapipe.schedule.grid import fail

Orders = Sequence[Sequence[Action]]
Edge = tuple[int, int]  # sender and receiver, always neighbours
Step = Literal["post", "receive", "send"]  # "post" posts the first receives of an edge; each "receive" one more

MESSAGE = {Kind.FORWARD: "activation", Kind.BACKWARD: "gradient"}
"""What goes down and up."""


def taken(order: Sequence[Action], direction: Kind) -> list[tuple[int, int]]:
    """(position, microbatch) of the actions that take a message, activations (FORWARD) or gradients (BACKWARD), and
    send one on."""
    forward = direction is Kind.FORWARD
    return [
        (position, action.index)
        for position, action in enumerate(order)
        if (action.kind is Kind.FORWARD if forward else action.kind.answers)
    ]


def check_ring(orders: Orders, stage: int, direction: Kind, training: bool, slots: int, ahead: int) -> None:
    """Prove that there is a free slot for every receive. The receive of message k of the edge is posted when message
    k - `ahead` is taken, and its slot is free again when the microbatch is completed (in an evaluation, at once)."""
    order = orders[stage]
    takers = dict(taken(order, direction))
    arrivals = list(takers.values())
    holders: list[int] = []
    posted = received = 0
    for position, action in enumerate(order):
        if position in takers:
            received += 1
            for following in arrivals[posted : received + ahead]:
                if len(holders) == slots:
                    reason = f"no slot is free for the receive of the {MESSAGE[direction]} of microbatch {following}: "
                    reason += f"there are {slots}, for microbatches {', '.join(map(str, holders))}"
                    fail(orders, stage, position, reason)
                holders.append(following)
                posted += 1
        if action.kind.completes if training else position in takers:
            holders.remove(action.index)


def _steps(order: Sequence[Action], stage: int, stages: int) -> Iterator[tuple[int, Step, Edge]]:
    """What a stage does on its edges: the position of the action, the step, the edge."""
    opened: set[Edge] = set()
    for position, action in enumerate(order):
        if action.kind in (Kind.UPDATE, Kind.BACKWARD_WEIGHT):
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


def check_progress(orders: Orders, send_slots: int, ahead: int) -> None:
    """Run all orders to their end.

    Counting is enough, for both ends of an edge agree on the messages. No step disables another, so the order in
    which the stages get their turn does not matter.
    """
    stages = len(orders)
    done: Counter[tuple[Step, Edge]] = Counter()

    def possible(step: Step, edge: Edge) -> bool:
        sent, received = done["send", edge], done["receive", edge]
        if step == "send":
            return sent < done["post", edge] * ahead + received + send_slots
        return step == "post" or received < sent

    def wait(position: int, step: Step, edge: Edge) -> str:
        sender, receiver = edge
        kind = Kind.FORWARD if sender < receiver else Kind.BACKWARD
        messages = [microbatch for _, microbatch in taken(orders[sender], kind)]
        if step == "receive":
            message = f"{MESSAGE[kind]} of microbatch {messages[done[step, edge]]}"
            return f"{orders[receiver][position]} waits for the {message} from stage {sender}"
        message = f"{MESSAGE[kind]} of microbatch {messages[done[step, edge] - send_slots]}"
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
        fail(orders, stage, blocked[stage][0], f"deadlock, no stage can go on:\n{waits}")
