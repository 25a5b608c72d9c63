"""How stages talk: one interface, two implementations (in-process queues; torch.distributed)."""

from adapipe.engine.transport.base import Direction, Message, Steps, TensorSpec, Transport

__all__ = ["Direction", "Message", "Steps", "TensorSpec", "Transport"]
