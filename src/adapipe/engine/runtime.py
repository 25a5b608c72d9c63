"""The runtime of one stage: it walks an order, action by action, and knows no schedule by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from adapipe.engine.bulletin import Bulletin
from adapipe.engine.clipping import clip_coefficient
from adapipe.engine.clock import Clock
from adapipe.engine.stage import Stage
from adapipe.engine.transport import Direction, Steps, Transport
from adapipe.engine.transport.base import T, Vector
from adapipe.engine.work import Batches, Record, Report, Row, Work
from adapipe.errors import AdaPipeError, ConfigurationError, EngineError, PeerFailure, StageFailure
from adapipe.schedule import (
    Action,
    Kind,
    SegmentOrder,
    SyncSchedule,
    UpdateOrder,
    evaluation_order,
    laws,
    sync_schedule,
)
from adapipe.schedule.table import CODES, NOTHING


class Runtime:
    """Runs the actions of one stage.

    microbatches: K, per update. clip: limit of the global gradient norm, or None. count: targets -> tokens in them.
    rank: named in messages. in_flight: microbatches in flight per hop. schedule: of synchronous updates, 1F1B if it is
    not given; it may be replaced while the pipeline is flushed. The transport must have the buffers for both. keep:
    updates whose records are kept beyond the run that made them.
    """

    def __init__(
        self,
        stage: Stage,
        transport: Transport,
        clock: Clock,
        batches: Batches,
        *,
        microbatches: int,
        clip: float | None,
        count: Callable[[Any], int],
        rank: int,
        in_flight: int = 1,
        schedule: SyncSchedule | None = None,
        keep: range = range(0),
    ) -> None:
        self.stage = stage
        self.transport = transport
        self.clock = clock
        self.batches = batches
        self.microbatches = microbatches
        self.clip = clip
        self.count = count
        self.rank = rank
        self.in_flight = in_flight
        self.schedule = schedule or sync_schedule("1f1b", stage.stages, microbatches, in_flight)
        self.keep = keep
        self.bulletin = Bulletin(stage.stages)
        self.records: list[Record] = []
        self.kept: list[Record] = []
        self.most_versions = 1
        self._targets: dict[int, Any] = {}  # last stage: of the update in progress and of microbatches in flight
        self._tokens: dict[int, int] = {}  # last stage: by update
        self._losses: list[float] = []  # last stage: sums of the update in progress
        self._staleness: list[int] = []  # of the update in progress
        self._waited = 0.0  # since the last update ended
        self._ended = 0.0  # when it ended
        self._versioned = False
        self._warm_up = laws.warm_up(stage.index, stage.stages, in_flight)
        self._ahead = laws.receives_ahead(in_flight)
        self._exact = True  # the norms of all stages are exchanged at the update, not taken from the bulletin
        self._segment_start = 0
        self._stopping = False
        self._bound = 0  # of the staleness in this segment
        self._order: SegmentOrder | UpdateOrder
        self._work: Work

    # -- training ------------------------------------------------------------------------------------------------

    def run(self, work: Work) -> Steps[Report]:
        """Make the updates of `work`. May make fewer: if `should_stop` says so, or if a stage had to skip a gradient
        that was not finite between flushes. The same report on every stage."""
        if work.updates < 1 or work.flush_every < 1:
            raise EngineError(f"a run of {work.updates} updates in segments of {work.flush_every} does not exist")
        if work.first_update != self.stage.versions.number:
            raise EngineError(
                f"the run begins with update {work.first_update}, but stage {self.stage.index} has made "
                f"{self.stage.versions.number}"
            )
        self._work = work
        self.stage.module.train()
        self.records.clear()
        self._stopping = False
        rows: list[Row] = []
        self._waited, self._ended = 0.0, self.clock.now()
        done, end = work.first_update, work.first_update + work.updates
        while done < end and not self._stopping:
            yield from self._segment(done, min(work.flush_every, end - done), rows)
            done = self._order.end_update
        # The wait until the last stage has flushed is part of the run.
        asked = self.stage.first and work.should_stop()
        flags = yield from self.gather(np.array([float(asked)]))
        now = self.clock.now()
        rows[-1] = rows[-1]._replace(
            seconds=rows[-1].seconds + now - self._ended, waited=rows[-1].waited + self._waited, ended=now
        )
        gathered = yield from self.gather(np.array(rows).ravel())
        return Report(gathered.reshape(self.stage.stages, len(rows), len(Row._fields)), stopped=bool(flags[0, 0]))

    def _segment(self, first_update: int, updates: int, rows: list[Row]) -> Steps[None]:
        stage = self.stage
        self._segment_start = first_update
        self._exact = updates == 1
        if self._exact:
            self._order = UpdateOrder(self.schedule.orders[stage.index], self.microbatches, first_update)
        else:
            self._order = SegmentOrder(
                stage.index, stage.stages, self.microbatches, first_update, updates, self.in_flight
            )
        self._answers_expected = False
        self._bound = 0 if self._exact else laws.staleness_bound(self._warm_up, self.microbatches)
        self._versioned = self._bound > 0
        if self._exact:
            self.transport.prepare_exchange()
        if not stage.first:
            self._post(Direction.DOWN, None)
        for action in self._order:
            if action.kind is Kind.FORWARD:
                yield from self._located(action, self._forward(action))
            elif action.kind.answers:
                yield from self._located(action, self._backward(action))
            elif action.kind is Kind.BACKWARD_WEIGHT:
                yield from self._located(action, self._backward_weight(action))
            else:
                yield from self._located(action, self._update(action, rows))
        if stage.in_flight:
            raise EngineError(f"stage {stage.index} flushed with {stage.in_flight} microbatches in flight")

    def _located(self, action: Action, steps: Steps[T], doing: str = "") -> Steps[T]:
        """Say where it happened if something goes wrong, and what was being done."""
        try:
            return (yield from steps)
        except (PeerFailure, StageFailure, ConfigurationError):
            raise
        except Exception as error:
            microbatch = None if action.kind is Kind.UPDATE else action.index
            what = str(error) if isinstance(error, AdaPipeError) else f"{type(error).__name__}: {error}"
            raise StageFailure(
                doing + what, rank=self.rank, stage=self.stage.index, cell=str(action), microbatch=microbatch
            ) from error

    def _forward(self, action: Action) -> Steps[None]:
        i, stage = action.index, self.stage
        start = began = self.clock.now()
        targets = self._targets_of(i) if stage.last else None
        if stage.first:
            self._maybe_stop(i)
            inputs = self._load(i)[0].to(stage.device)
        else:
            message = yield from self.transport.receive(Direction.DOWN, i)
            began = self.clock.now()
            self._read(message.note)
            inputs = message.payload
            self._post(Direction.DOWN, i)
        output = stage.forward(i, inputs, targets, versioned=self._versioned)
        self.clock.spend(action.kind)
        if stage.last:
            loss = float(output)
            if not math.isfinite(loss):
                raise AdaPipeError(
                    f"the loss is {loss}: the run has diverged (lower the learning rate, or clip gradients), or the "
                    "data or the loss function gives values that are not finite"
                )
            self._losses.append(loss)
        done = self.clock.now()
        if not stage.last:
            yield from self._send(Direction.DOWN, i, output)
            if not self._answers_expected:
                self._answers_expected = True
                self._post(Direction.UP, None)
        self.most_versions = max(self.most_versions, stage.versions.live)
        self._record(action, start, began, done, stage.versions.number)

    def _backward(self, action: Action) -> Steps[None]:
        i, stage = action.index, self.stage
        start = began = self.clock.now()
        gradient = None
        if not stage.last:
            message = yield from self.transport.receive(Direction.UP, i)
            began = self.clock.now()
            self._read(message.note)
            gradient = message.payload
            self._post(Direction.UP, i)
        update = i // self.microbatches
        scale = 1.0 / self._tokens[update] if stage.last else 1.0
        run = stage.backward if action.kind.completes else stage.backward_input
        input_gradient, used = run(i, gradient, scale)
        self.clock.spend(action.kind)
        done = self.clock.now()
        if input_gradient is not None:
            yield from self._send(Direction.UP, i, input_gradient)
        if action.kind.completes:
            self._release(i)
        staleness = update - used
        if not 0 <= staleness <= self._bound:
            raise EngineError(
                f"the gradient of microbatch {i} is {staleness} updates old, the law allows {self._bound}"
            )
        self._staleness.append(staleness)
        self._record(action, start, began, done, used)

    def _backward_weight(self, action: Action) -> Steps[None]:
        start = self.clock.now()
        self.stage.backward_weight(action.index)
        self.clock.spend(action.kind)
        self._release(action.index)
        self._record(action, start, start, self.clock.now(), self.stage.versions.number)
        return
        yield  # a generator like the other actions, though it never waits

    def _release(self, microbatch: int) -> None:
        """What was received for this microbatch is no longer needed."""
        if not self.stage.last:
            self.transport.release(Direction.UP, microbatch)
        if not self.stage.first:
            self.transport.release(Direction.DOWN, microbatch)

    def _update(self, action: Action, rows: list[Row]) -> Steps[None]:
        update, stage, bulletin = action.index, self.stage, self.bulletin
        start = self.clock.now()
        waited, loss, tokens = 0.0, math.nan, 0
        if stage.last:
            tokens = self._tokens.pop(update)
            loss = sum(self._losses) / tokens
            self._losses.clear()
            bulletin.post_loss(update, loss)
        own = stage.squared_norm()
        if self._exact:
            gathering = self.clock.now()
            gathered = yield from self.transport.exchange(np.array([own, loss]))
            waited = self.clock.now() - gathering
            skip = not bool(np.isfinite(gathered[:, 0]).all())
            bulletin.post_loss(update, float(gathered[-1, 1]))
            for other, squared in enumerate(gathered[:, 0]):
                if not skip:
                    bulletin.post_norm(other, update, float(squared))
        else:
            skip = not math.isfinite(own)
            if not skip:
                bulletin.post_norm(stage.index, update, own)
        squared = bulletin.squared_norm()
        if skip:
            bulletin.post_skipped(stage.index, update)
            stage.skip_update(self._work.rate_factor(update))
        else:
            stage.update(self._work.rate_factor(update), clip_coefficient(squared, self.clip))
        self.clock.spend(action.kind)
        versions = laws.version_bound(self._warm_up, self.microbatches)
        if stage.versions.live > versions:
            raise EngineError(f"{stage.versions.live} weight versions are live, the law allows {versions}")
        self.most_versions = max(self.most_versions, stage.versions.live)
        now = self.clock.now()
        self._record(action, start, start + waited, now, stage.versions.number)
        staleness = self._staleness
        rows.append(
            Row(
                update=update,
                loss=loss,
                tokens=tokens,
                squared_norm=own,
                clip_norm=math.nan if skip else math.sqrt(squared),
                learning_rate=stage.learning_rate,
                skipped=float(skip),
                mean_staleness=sum(staleness) / len(staleness),
                most_stale=max(staleness),
                seconds=now - self._ended,
                waited=self._waited,
                ended=now,
            )
        )
        self._staleness, self._waited, self._ended = [], 0.0, now
        if stage.first:
            self._work.on_update(update + 1, bulletin.loss)

    def _maybe_stop(self, microbatch: int) -> None:
        """On stage 0: end the run soon, if asked to, or if a stage had to skip a non-finite gradient between flushes.

        The note of this forward tells the other stages, which have posted receives ahead of it: so the run ends with
        the update of the last microbatch that they expect."""
        if self._stopping:
            return
        skipped = self._work.flush_every > 1 and self.bulletin.skipped_since(self._work.first_update)
        if skipped or self._work.should_stop():
            end = -(-(microbatch + self._ahead) // self.microbatches)
            self.bulletin.post_end(min(end, self._order.end_update))
            self._obey_end()

    def _read(self, note: Vector) -> None:
        self.bulletin.merge(note)
        self._obey_end()

    def _obey_end(self) -> None:
        end = self.bulletin.end_after(self._segment_start)
        if end is not None and not self._stopping:
            self._order.end_at(end)
            self._stopping = True

    # -- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(self, batches: Batches, microbatches: int) -> Steps[tuple[float, int]]:
        """Loss sum and token count over held-out `microbatches`, known on every stage. The pipeline must be flushed."""
        stage = self.stage
        if stage.in_flight:
            raise EngineError(f"stage {stage.index} evaluates with {stage.in_flight} microbatches in flight")
        stage.module.eval()
        total, tokens = 0.0, 0
        for action in evaluation_order(stage.index, microbatches):
            one = self._evaluate_one(action, batches, microbatches)
            counted = yield from self._located(action, one, "evaluation failed: ")
            total, tokens = total + counted[0], tokens + counted[1]
        gathered = yield from self.gather(np.array([total, tokens]))
        return float(gathered[-1, 0]), int(gathered[-1, 1])

    def _evaluate_one(self, action: Action, batches: Batches, microbatches: int) -> Steps[tuple[float, int]]:
        i, stage = action.index, self.stage
        targets = batches(i)[1] if stage.last else None
        if stage.first:
            inputs = batches(i)[0].to(stage.device)
        else:
            message = yield from self.transport.receive(Direction.DOWN, i)
            inputs = message.payload
            self.transport.post(Direction.DOWN, range(i + 1, min(i + 1 + self._ahead, microbatches)))
        output = stage.evaluate(inputs, self._to_device(targets))
        self.clock.spend(action.kind)
        if not stage.first:
            self.transport.release(Direction.DOWN, i)
        if stage.last:
            return float(output), self.count(targets)
        yield from self._send(Direction.DOWN, i, output)
        return 0.0, 0

    def share(self, records: Sequence[Record]) -> Steps[Vector]:
        """(stages, actions, 5): such records of all stages as kind code, index, start, began, done. Where a stage has
        fewer actions than others, NOTHING and NaN. The records must be of the same updates."""
        updates = sum(record.action.kind is Kind.UPDATE for record in records)
        most = updates * (3 * self.microbatches + 1)  # F, I, W and U
        kept = np.full((most, 5), np.nan)
        kept[:, :2] = NOTHING
        for row, r in zip(kept, records, strict=False):
            row[:] = CODES[r.action.kind], r.action.index, r.start, r.began, r.done
        gathered = (yield from self.gather(kept.ravel())).reshape(self.stage.stages, most, 5)
        return gathered[:, : int((gathered[:, :, 0] != NOTHING).sum(1).max())]

    # -- parts ---------------------------------------------------------------------------------------------------

    def _load(self, microbatch: int) -> tuple[torch.Tensor, Any]:
        try:
            inputs, targets = self.batches(microbatch)
        except Exception as error:
            what = f"loading microbatch {microbatch} failed: {type(error).__name__}: {error}"
            raise AdaPipeError(what) from error
        return inputs, targets

    def _targets_of(self, microbatch: int) -> Any:
        """The targets of a microbatch. The tokens of its whole update are counted before its first backward."""
        update = microbatch // self.microbatches
        if update not in self._tokens:
            first = update * self.microbatches
            self._targets = {i: self._load(i)[1] for i in range(first, first + self.microbatches)}
            tokens = sum(self.count(targets) for targets in self._targets.values())
            if tokens < 1:
                raise AdaPipeError(f"the {self.microbatches} microbatches of update {update} hold no token to learn")
            self._tokens[update] = tokens
        return self._to_device(self._targets.pop(microbatch))

    def _to_device(self, targets: Any) -> Any:
        return targets.to(self.stage.device) if isinstance(targets, torch.Tensor) else targets

    def _post(self, direction: Direction, after: int | None) -> None:
        """Make ready for the messages of the segment that follow this microbatch; None: for the first ones."""
        taken_by = Kind.FORWARD if direction is Direction.DOWN else Kind.BACKWARD
        self.transport.post(direction, self._order.following(taken_by, after, self._ahead))

    def _send(self, direction: Direction, microbatch: int, payload: torch.Tensor) -> Steps[None]:
        """Send, with the bulletin as note."""
        yield from self.transport.send(direction, microbatch, payload, self.bulletin.vector)

    def gather(self, row: Vector) -> Steps[Vector]:
        """The rows of all stages, (stages, numbers). All stages call it at the same point between their actions."""
        start = self.clock.now()
        gathered = yield from self.transport.all_gather(row)
        self._waited += self.clock.now() - start
        return gathered

    def _record(self, action: Action, start: float, began: float, done: float, used: int) -> None:
        record = Record(action, start, began, done, self.clock.now(), used, self.stage.versions.number)
        self._waited += record.waited
        self.records.append(record)
        update = action.index if action.kind is Kind.UPDATE else action.index // self.microbatches
        if update in self.keep:
            self.kept.append(record)
