"""The slope policy: measure the rate of progress of each mode, run the better one, measure again at growing intervals.

    sync until the warm-up ends
    measure sync                          held-out loss gained per second over a window
    repeat:
        settle in the other mode          the first updates after a switch are left out
        measure the other mode
        run the winner for the dwell time, which doubles as long as the winner stays the same
        measure the winner

This is the rule of the method as published in outline: it compares slopes over successive windows. The curve decays, so
the mode that is measured second is at a disadvantage, and a switch has a shock that outlasts short windows. See
docs/policies.md.
"""

from __future__ import annotations

from collections.abc import Generator

from adapipe.budget import Budget
from adapipe.policy.base import Decision, Line, Mode
from adapipe.policy.meter import Meter, rate

MIN_WINDOW = 20
"""Updates of the shortest measurement: fewer measure noise."""

_FIRST_STEPS = 5  # updates before the length of an update is known


class Slope:
    """See the module.

    warmup: share of the budget that is synchronous whatever is measured. window: length of a measurement, as a share of
    the budget. settle: updates left out after a switch, as a share of the window. dwell: stay with a new winner, in
    windows; doubled whenever a trial confirms the winner.
    """

    def __init__(
        self, budget: Budget, *, warmup: float, window: float = 0.05, settle: float = 0.4, dwell: float = 2.0
    ) -> None:
        self._budget = budget
        self._warmup = warmup
        self._share = window
        self._settle = settle
        self._dwell = dwell
        self._meter = Meter()
        self._decisions = self._decide()

    def observe(self, line: Line) -> None:
        self._meter.observe(line)

    def decide(self) -> Decision:
        return next(self._decisions)

    def _updates(self, share: float) -> int:
        """So much of the budget, in updates at the present speed; at least 1."""
        return max(1, round(share * self._total_updates))

    @property
    def _total_updates(self) -> float:
        """The whole budget in updates, at the present speed."""
        if self._budget.updates is not None:
            return self._budget.updates
        per_update = self._meter.seconds_per_update
        return _FIRST_STEPS if per_update is None else (self._budget.seconds or 0.0) / per_update

    @property
    def _window(self) -> float:
        """Length of a measurement, as a share of the budget; in a short run, what MIN_WINDOW updates take."""
        return max(self._share, MIN_WINDOW / self._total_updates)

    def _fraction(self) -> float:
        return self._budget.fraction(self._meter.update, self._meter.seconds)

    def _decide(self) -> Generator[Decision, None, None]:
        while (left := self._warmup - self._fraction()) > 1e-9:
            updates = self._updates(left) if self._meter.seconds_per_update else min(self._updates(left), _FIRST_STEPS)
            yield Decision("sync", updates, evaluate=True, reason="synchronous until the warm-up ends")
        winner: Mode = "sync"
        best = yield from self._measure("sync")
        dwell = self._dwell
        # A trial costs a settling time and a window, and must still be able to pay for itself.
        while 1.0 - self._fraction() > (2 + self._settle) * self._window:
            challenger: Mode = "async" if winner == "sync" else "sync"
            rival = yield from self._measure(challenger)
            numbers = {f"rate_{winner}": best, f"rate_{challenger}": rival}
            if rival > best:
                winner, dwell = challenger, self._dwell
            else:
                dwell *= 2.0
            yield Decision(
                winner,
                self._updates(dwell * self._window),
                evaluate=True,
                reason=f"{winner} gains more held-out loss per second "
                f"({numbers[f'rate_{winner}']:.2e} against {min(numbers.values()):.2e})",
                numbers=numbers,
            )
            best = yield from self._measure(winner)
        while True:
            yield Decision(winner, reason=f"too little of the budget is left for a trial: {winner} to the end")

    def _measure(self, mode: Mode) -> Generator[Decision, None, float]:
        """Run a window in `mode`, after settling in it if need be; its rate of progress, in held-out loss per second.

        A mode whose held-out loss or gradients are not finite in the meantime makes no progress: -infinity.
        """
        for _ in range(2):  # a gradient that was not finite may come in between once
            if self._meter.fresh_reading(mode) is None:
                updates = self._updates(self._settle * self._window)
                yield Decision(mode, updates, evaluate=True, reason=f"settling in {mode} before it is measured")
        before = self._meter.fresh_reading(mode)
        yield Decision(mode, self._updates(self._window), evaluate=True, reason=f"measuring {mode}")
        after = self._meter.fresh_reading(mode)
        if before is None or after is None:
            return float("-inf")
        return rate(before, after)
