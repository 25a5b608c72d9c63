"""A backward in two halves: first the gradient of the input, later those of the weights.

    output ──> join ──> node ──> join ──> input         the path
                 │                 │
                 └──> weight       └──> node ──> weight

In the graph that autograd made, a join is a node on the path that also leads to weights without it. The first half, I,
runs the path and notes the gradients that arrive at the joins. The second, W, runs from each join to the weights that
only this join leads to, which does not run the path again.

A weight that several joins lead to, since it is used more than once, is different: from the later join autograd would
also find the way along the path to the earlier one, and count it twice. Its gradient is made from the output, as usual;
that runs a part of the path again.

Blocks that recompute their activations in the backward (torch.utils.checkpoint) would do so in I, and again in W for
every join. Such a backward is not split: `SplitBackward.input` raises `Recomputes` before anything is recomputed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch.autograd.graph import GradientEdge, Node, disable_saved_tensors_hooks, get_gradient_edge

from adapipe.errors import AdaPipeError

_REENTRANT = "CheckpointFunctionBackward"


_RECOMPUTES = "this backward recomputes activations"


class Recomputes(Exception):
    """The backward recomputes activations, and must be a whole one. It can still be made."""


class SplitBackward:
    """The backward of `output`, which requires a gradient, into the leaf `received` and the leaves of the weights.

    `input` comes first, then `weight`; the tensors of the graph are kept until then.
    """

    def __init__(self, output: torch.Tensor, gradient: torch.Tensor, received: torch.Tensor) -> None:
        self._output = output
        self._gradient = gradient
        self._received = received
        self._joins: list[tuple[list[GradientEdge], list[torch.Tensor]]] = []
        self._from_output: list[torch.Tensor] = []  # weights whose gradients are made from the output
        self._arrived: Sequence[torch.Tensor | None] = ()

    def input(self) -> torch.Tensor | None:
        """The gradient of `received`; None if the output does not depend on it. Raises Recomputes."""
        if not self._split():
            return None
        wanted = [get_gradient_edge(self._received), *(edge for arriving, _ in self._joins for edge in arriving)]
        try:
            # A recomputation saves what it computes by hooks, so forbidding them finds it out.
            with disable_saved_tensors_hooks(_RECOMPUTES):
                gradient, *arrived = torch.autograd.grad(
                    self._output, wanted, self._gradient, retain_graph=True, allow_unused=True
                )
        except RuntimeError as error:
            if _RECOMPUTES in str(error):
                raise Recomputes from None
            raise
        self._arrived = arrived
        return gradient

    def weight(self) -> None:
        """Accumulate the gradients of the weights. The graph is of no use afterwards."""
        if self._from_output:
            keep = bool(self._joins)
            torch.autograd.backward(self._output, self._gradient, retain_graph=keep, inputs=self._from_output)
        arrived = iter(self._arrived)
        for edges, weights in self._joins:
            found = [(edge, gradient) for edge in edges if (gradient := next(arrived)) is not None]
            if found and weights:
                torch.autograd.backward([edge for edge, _ in found], [grad for _, grad in found], inputs=weights)

    def _split(self) -> bool:
        """Find the joins. False if there is no path from the output to the input."""
        root, target = get_gradient_edge(self._output), get_gradient_edge(self._received).node
        edges, leaves_first = _walk(root.node)
        path: set[Node] = set()
        behind: dict[Node, frozenset[Node]] = {}  # off the path: the leaves that a node leads to
        for node in leaves_first:
            following = edges[node]
            if node is target or any(other in path for other, _ in following):
                path.add(node)
            elif following:
                behind[node] = frozenset().union(*(behind[other] for other, _ in following))
            else:
                behind[node] = frozenset([node] if node.name() == "torch::autograd::AccumulateGrad" else [])
        if root.node not in path:
            self._from_output = [_variable(leaf) for leaf in behind[root.node]]
            return False
        arriving: dict[Node, set[int]] = {node: set() for node in path}
        arriving[root.node].add(root.output_nr)
        for node in path:
            for other, number in edges[node]:
                if other in path:
                    arriving[other].add(number)
        joins = {
            node: frozenset().union(*(behind[other] for other, _ in edges[node] if other not in path)) for node in path
        }
        uses = Counter(leaf for leaves in joins.values() for leaf in leaves)
        self._from_output = [_variable(leaf) for leaf, count in uses.items() if count > 1]
        for node in reversed(leaves_first):
            weights = [_variable(leaf) for leaf in joins.get(node, ()) if uses[leaf] == 1]
            if weights:
                self._joins.append(([GradientEdge(node, number) for number in sorted(arriving[node])], weights))
        return True


def _walk(root: Node) -> tuple[dict[Node, list[tuple[Node, int]]], list[Node]]:
    """All nodes that `root` leads to, with their edges (node, number of its input); and in an order in which a node
    comes after those that it leads to."""
    edges: dict[Node, list[tuple[Node, int]]] = {}
    leaves_first: list[Node] = []
    todo = [(root, False)]
    while todo:
        node, left = todo.pop()
        if left:
            leaves_first.append(node)
        elif node not in edges:
            if type(node).__name__ == _REENTRANT:
                raise AdaPipeError(
                    "a block uses torch.utils.checkpoint with use_reentrant=True, whose backward cannot be split: give "
                    "it use_reentrant=False, or choose --sync-schedule 1f1b"
                )
            edges[node] = [(other, number) for other, number in node.next_functions if other is not None]
            todo.append((node, True))
            todo += [(other, False) for other, _ in edges[node] if other not in edges]
    return edges, leaves_first


def _variable(leaf: Node) -> torch.Tensor:
    """The tensor that a leaf accumulates into."""
    variable: torch.Tensor = leaf.variable  # type: ignore[attr-defined]
    return variable
