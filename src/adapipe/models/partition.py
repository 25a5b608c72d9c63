"""Cut a list of blocks into P contiguous stages of about equal cost.

blocks   0 1 2 3 4 5 6 7
stages   └─0─┘ └─1─┘ └2┘        partition(costs, 3) = [range(0, 3), range(3, 6), range(6, 8)]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from adapipe.errors import ConfigurationError


def partition(costs: Sequence[float], stages: int) -> list[range]:
    """The contiguous, non-empty stages whose largest cost is smallest, as ranges of block indices.

    Among those, the cut with the smallest sum of squared stage costs (the most even one); among those, the
    cut with the fewest blocks in the earliest stages, which hold the most microbatches in flight. Exact and
    deterministic, O(stages * blocks^2). Raises ConfigurationError if there are more stages than blocks or
    fewer than 1, and for a negative or non-finite cost.
    """
    if stages < 1:
        raise ConfigurationError(f"{stages} stages cannot hold a model: use at least 1 stage")
    if stages > len(costs):
        raise ConfigurationError(
            f"{stages} stages need at least {stages} blocks, but the model has {len(costs)}: "
            "use fewer stages or more layers"
        )
    for index, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise ConfigurationError(f"block {index} has cost {cost}: costs must be finite and not negative")
    # Whole numbers, because rounding would break ties between equal layers at random.
    exact = [Fraction(cost) for cost in costs]
    unit = math.lcm(*(cost.denominator for cost in exact))
    sums = [0, *accumulate(int(cost * unit) for cost in exact)]
    # Two passes, because the best end of a list (largest stage first, then evenness) need not end the best whole.
    largest, _ = _best_cuts(sums, stages, max, sums[-1])
    _, cuts = _best_cuts(sums, stages, lambda cost, rest: cost * cost + rest, largest)
    return [range(start, end) for start, end in pairwise(cuts)]


def _best_cuts(sums: Sequence[int], stages: int, join: Callable[[int, int], int], limit: int) -> tuple[int, list[int]]:
    """The smallest value of join(stage 0, join(stage 1, ...)) with no stage above `limit`, and its earliest cuts.

    `sums[i]` is the cost of the blocks before i. Dynamic programming from the last stage to the first.
    """
    end = len(sums) - 1
    best = {end: (0, [end])}  # first block -> value and cuts of the blocks from there on; absent if impossible
    for _ in range(stages):
        longer: dict[int, tuple[int, list[int]]] = {}
        for start in range(end):
            options = [
                (join(sums[cut] - sums[start], value), cut)
                for cut, (value, _) in best.items()
                if cut > start and sums[cut] - sums[start] <= limit
            ]
            if options:
                value, cut = min(options)
                longer[start] = (value, [start, *best[cut][1]])
        best = longer
    return best[0]


def check_partition(parts: Sequence[range], blocks: int) -> None:
    """Raise ConfigurationError unless the stages hold all blocks in order, each once, and none is empty."""
    expected = 0
    for stage, part in enumerate(parts):
        if part.start != expected or part.step != 1 or not part:
            raise ConfigurationError(
                f"stage {stage} holds the blocks {part}, but must be a range from block {expected} on: "
                "give every block to exactly one stage, in order"
            )
        expected = part.stop
    if expected != blocks:
        raise ConfigurationError(
            f"the stages hold the blocks 0 to {expected - 1}, but the model has {blocks} blocks: "
            "give every block to exactly one stage, in order"
        )
