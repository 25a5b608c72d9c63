"""AdaPipe: pipeline-parallel training that alternates between synchronous and asynchronous phases."""

from typing import TYPE_CHECKING, Any

from adapipe.errors import AdaPipeError, ConfigurationError, PeerFailure, StageFailure

if TYPE_CHECKING:
    from adapipe.run import Result, train

__all__ = ["AdaPipeError", "ConfigurationError", "PeerFailure", "Result", "StageFailure", "train"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Load torch only when something is trained: `adapipe --help` answers at once."""
    if name in ("Result", "train"):
        from adapipe import run

        return getattr(run, name)
    raise AttributeError(f"module 'adapipe' has no attribute {name!r}")
