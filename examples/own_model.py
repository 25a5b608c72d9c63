"""Your own blocks, loss, optimizer and batches through a pipeline, in any mode.

torchrun --nproc-per-node 2 examples/own_model.py          two stages, one process each
python examples/own_model.py                               one stage, to try things out
"""

import torch
from torch import nn

import adapipe

torch.manual_seed(0)  # every rank builds the same blocks and keeps its own
blocks = [nn.Linear(16, 64), nn.Sequential(nn.GELU(), nn.Linear(64, 64)), nn.Sequential(nn.GELU(), nn.Linear(64, 4))]


def batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Microbatch i: which quarter of the circle the sum of the first and of the last inputs points to."""
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(i))
    return x, 2 * (x[:, :8].sum(1) > 0).long() + (x[:, 8:].sum(1) > 0).long()


result = adapipe.train(
    blocks,
    loss=nn.CrossEntropyLoss(reduction="sum"),
    batches=batch,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    mode="adaptive",
    updates=300,
    held_out=[batch(10**6 + i) for i in range(4)],
)
print(f"held-out loss {result.summary['held_out_loss']:.3f}")
