"""The folder of a run: config.toml, metrics.jsonl, decisions.jsonl, summary.json, curves.png; cost.toml if it
was emulated, timeline.png if one was asked for."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from adapipe.errors import ConfigurationError
from adapipe.policy import Decision
from adapipe.reports.curves import draw_curves
from adapipe.reports.metrics import MetricsWriter, read_metrics, write_json
from adapipe.schedule.actions import Kind
from adapipe.schedule.cost import CostModel, cost_toml
from adapipe.schedule.table import CODES
from adapipe.schedule.timeline import Timeline

_FILES = ("config.toml", "metrics.jsonl", "decisions.jsonl", "summary.json", "curves.png", "cost.toml", "timeline.png")


def make_folder(path: Path, overwrite: bool) -> None:
    """Make an empty folder for a run, or take one that holds none. Raises ConfigurationError if it cannot be used."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        taken = [name for name in _FILES if (path / name).exists()]
        writable = os.access(path, os.W_OK)
    except FileExistsError:
        raise ConfigurationError(f"--out {path} is a file: give a folder") from None
    except OSError as error:
        raise _unusable(path, error.strerror) from None
    if not writable:
        raise _unusable(path, os.strerror(errno.EACCES))
    if taken and not overwrite:
        raise ConfigurationError(
            f"--out {path} holds another run ({', '.join(taken)}): give another folder, or --overwrite to replace it"
        )


def _unusable(path: Path, why: str | None) -> ConfigurationError:
    return ConfigurationError(f"--out {path} cannot be written ({why}): give a folder that you may write to")


class RunFolder:
    """Writes a run. Only one rank has one."""

    def __init__(
        self, path: Path, *, overwrite: bool = False, config: str | None = None, cost: CostModel | None = None
    ) -> None:
        """config: the text of config.toml. cost: what emulated the run.

        Raises ConfigurationError if the folder cannot be used.
        """
        make_folder(path, overwrite)
        try:
            for name in _FILES:
                (path / name).unlink(missing_ok=True)
            if config is not None:
                (path / "config.toml").write_text(config, encoding="utf-8", errors="surrogateescape")
            if cost is not None:
                (path / "cost.toml").write_text(cost_toml(cost))
            self._metrics = MetricsWriter(path / "metrics.jsonl")
            self._decisions = MetricsWriter(path / "decisions.jsonl")
        except OSError as error:
            raise _unusable(path, error.strerror) from error
        self.path = path

    def line(self, line: dict[str, Any]) -> None:
        self._metrics.write(line)

    def decided(self, update: int, seconds: float, decision: Decision) -> None:
        self._decisions.write(
            {
                "update": update,
                "training_seconds": seconds,
                "mode": decision.mode,
                "updates": decision.updates,
                "evaluate": decision.evaluate,
                "reason": decision.reason,
                "numbers": decision.numbers,
            }
        )

    def finish(self, summary: dict[str, Any], timeline: Timeline | None) -> None:
        """Write the summary and draw the pictures."""
        self._metrics.close()
        self._decisions.close()
        write_json(self.path / "summary.json", summary)
        title = f"{summary['mode']}, {summary['stages']} stages, {summary['microbatches']} microbatches per update"
        draw_curves(
            read_metrics(self.path / "metrics.jsonl"),
            self.path / "curves.png",
            title=title,
            target_perplexity=summary["target_perplexity"],
            clock=summary["clock"],
        )
        if timeline is not None:
            from adapipe.reports.timeline import Panel, draw_timeline

            table = timeline.table
            updates = table.indices[table.kinds == CODES[Kind.UPDATE]]
            title += f", updates {updates.min()} to {updates.max()}"
            panel = Panel(title, table.kinds, table.indices, timeline.starts, timeline.ends)
            draw_timeline([panel], self.path / "timeline.png", clock=summary["clock"])
