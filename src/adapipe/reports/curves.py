"""The picture of a run: held-out perplexity against training time, with the phases shaded."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adapipe.policy.base import is_evaluation
from adapipe.training.summary import Phase, phases

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]

INCHES = (8.0, 4.5)
DOTS_PER_INCH = 150
# Blue and orange of the Okabe-Ito palette, lightened: told apart with any colour vision, and in grey.
SHADES = {"sync": ("synchronous", "#bfd9ee"), "async": ("asynchronous", "#fef0d4")}
OTHER_SHADE = "#e3e3e3"
# What is above is drawn here: a diverged run must not squeeze the rest flat, nor overflow the axis.
HIGHEST_PERPLEXITY = 1e9
INK, MUTED, RAW, TARGET = "#1a1a1a", "#555555", "#9a9a9a", "#b0330b"


def draw_curves(
    records: Sequence[Mapping[str, Any]],
    path: str | os.PathLike[str],
    *,
    title: str,
    target_perplexity: float | None = None,
    clock: str = "wall",
) -> None:
    """Draw one PNG of 1200 x 675 pixels from the records of a metrics.jsonl.

    Above, held-out perplexity (log scale) at each evaluation; below, training loss after each update, raw and
    smoothed. Both share the training clock, whose kind `clock` names ("wall" or "virtual"). Values that are
    null or not finite are left out.
    """
    # The canvas is used directly, without pyplot: no global state, and no display is ever looked for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    evaluation_seconds, perplexity = _evaluations(records)
    update_seconds, loss = _updates(records)
    end = max([0.0, *evaluation_seconds, *update_seconds])
    unit, short_unit, seconds_per_unit = _time_unit(end)

    figure = Figure(figsize=INCHES, dpi=DOTS_PER_INCH)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1, hspace=0.0)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for axes in (upper, lower):
        _plain_axes(axes)
        _shade(axes, phases(records), seconds_per_unit)
    _draw_perplexity(upper, evaluation_seconds / seconds_per_unit, perplexity, target_perplexity)
    _draw_loss(lower, update_seconds / seconds_per_unit, loss)

    lower.set_xlim(0, end / seconds_per_unit or 1.0)
    lower.set_xlabel(f"training time, {unit} ({clock} clock)", color=MUTED)
    figure.align_ylabels([upper, lower])
    reached = _target_label(evaluation_seconds, perplexity, target_perplexity, seconds_per_unit, short_unit)
    _legend(upper, reached)
    title = textwrap.fill(title, 88)
    upper.set_title(title, loc="left", pad=25, fontsize=11, fontweight="bold", color=INK, parse_math=False)

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _number(value: Any) -> float:
    """A record's value as a float; NaN for null and for what is not finite."""
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else math.nan


def _evaluations(records: Iterable[Mapping[str, Any]]) -> tuple[Floats, Floats]:
    """Training seconds and held-out perplexity of the evaluations where both are known."""
    pairs = [
        (_number(r.get("training_seconds")), _number(r.get("held_out_perplexity"))) for r in records if is_evaluation(r)
    ]
    values = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    values = values[np.isfinite(values).all(axis=1) & (values[:, 1] > 0)]
    return values[:, 0], values[:, 1]


def _updates(records: Iterable[Mapping[str, Any]]) -> tuple[Floats, Floats]:
    """Training seconds and loss after each update; an unknown loss is NaN, a gap in the line."""
    pairs = [(_number(r.get("training_seconds")), _number(r.get("loss"))) for r in records if not is_evaluation(r)]
    values = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    values = values[np.isfinite(values[:, 0])]
    return values[:, 0], values[:, 1]


def _time_unit(seconds: float) -> tuple[str, str, float]:
    """The unit that gives readable numbers: name, symbol, and how many seconds it has."""
    if seconds <= 600:
        return "seconds", "s", 1.0
    return ("minutes", "min", 60.0) if seconds <= 3 * 3600 else ("hours", "h", 3600.0)


def _smooth(values: Floats) -> Floats:
    """Mean of the known values around each one, over a fortieth of the run to each side (less near the ends)."""
    count = len(values)
    index = np.arange(count)
    # Symmetric at the start, where the loss falls fastest and a lopsided window would lie above it.
    reach = np.minimum(index, max(1, count // 40))
    first, last = index - reach, np.minimum(index + reach, count - 1) + 1
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    within = counts[last] - counts[first]
    means = (sums[last] - sums[first]) / np.maximum(within, 1)
    return np.where(within > 0, means, np.nan)


def _plain_axes(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(RAW)
    axes.tick_params(which="both", colors=MUTED, labelsize=8.5)
    axes.yaxis.label.set_color(MUTED)
    axes.grid(axis="y", which="major", color="white", linewidth=0.8)
    axes.set_axisbelow(True)


def _shade(axes: Axes, found: Sequence[Phase], seconds_per_unit: float) -> None:
    """One collection per mode, so that hundreds of phases are as cheap as two."""
    spans: dict[str, list[tuple[float, float]]] = {}
    start = 0.0
    for phase in found:
        spans.setdefault(phase.mode, []).append((start / seconds_per_unit, phase.seconds / seconds_per_unit))
        start += phase.seconds
    for mode in sorted(spans, key=lambda mode: (mode not in SHADES, mode != "sync", mode)):
        name, colour = SHADES.get(mode, (mode, OTHER_SHADE))
        bars = axes.broken_barh(spans[mode], (0, 1), color=colour, linewidth=0, label=name, zorder=0)
        bars.set_transform(axes.get_xaxis_transform())


def _draw_perplexity(axes: Axes, time: Floats, perplexity: Floats, target: float | None) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axes.set_ylabel("held-out perplexity")
    if len(time) == 0:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no evaluations", transform=axes.transAxes, ha="center", va="center", color=MUTED)
        return
    drawn = np.minimum(perplexity, HIGHEST_PERPLEXITY)
    axes.set_yscale("log")
    axes.plot(
        time,
        drawn,
        color=INK,
        linewidth=1.6,
        marker="o",
        markersize=max(1.0, min(4.0, 160 / len(time))),
        label=f"perplexity (last {perplexity[-1]:.4g})",
        clip_on=False,
        zorder=3,
    )
    low, high = float(drawn.min()), float(drawn.max())
    if target is not None and _drawable(target):
        axes.axhline(target, color=TARGET, linestyle=":", linewidth=1.4, zorder=2)
        low, high = min(low, target), max(high, target)
    margin = max((high / low) ** 0.06, 1.02 if len(time) > 1 else 1.2)
    axes.set_ylim(low / margin, high * margin)
    # Powers of ten alone would leave most runs with one labelled tick, or none.
    decades = math.log10(high / low)
    axes.yaxis.set_major_locator(
        MaxNLocator(nbins=5) if decades < 0.6 else LogLocator(subs=(1, 2, 5) if decades < 3 else (1,))
    )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _draw_loss(axes: Axes, time: Floats, loss: Floats) -> None:
    axes.set_ylabel("training loss")
    finite = loss[np.isfinite(loss)]
    if len(finite) == 0:
        axes.set_yticks([])
        return
    axes.plot(time, loss, color=RAW, linewidth=0.6, alpha=0.8, zorder=2)
    marker = "o" if len(finite) < 3 else None
    axes.plot(time, _smooth(loss), color=INK, linewidth=1.2, marker=marker, markersize=3, zorder=3)
    # A few spikes must not flatten the rest.
    low, high = np.quantile(finite, (0.0, 0.995))
    margin = max(0.06 * (high - low), 0.01 * abs(high), 0.02)
    axes.set_ylim(low - margin, high + margin)
    axes.locator_params(axis="y", nbins=3)


def _drawable(target: float) -> bool:
    return 0 < target < HIGHEST_PERPLEXITY


def _target_label(
    time: Floats, perplexity: Floats, target: float | None, seconds_per_unit: float, unit: str
) -> str | None:
    """The target, and when an evaluation first met it. None when no target is drawn."""
    if target is None or not _drawable(target) or len(time) == 0:
        return None
    met = np.flatnonzero(perplexity <= target)
    when = f"reached at {time[met[0]] / seconds_per_unit:.4g} {unit}" if len(met) else "not reached"
    return f"target {target:g} ({when})"


def _legend(axes: Axes, target_label: str | None) -> None:
    """A row between title and axes, where it can cover nothing."""
    from matplotlib.lines import Line2D

    handles, labels = axes.get_legend_handles_labels()
    # The curve first, then its target, then the shades.
    order = sorted(range(len(handles)), key=lambda i: not isinstance(handles[i], Line2D))
    handles, labels = [handles[i] for i in order], [labels[i] for i in order]
    if target_label is not None:
        handles.insert(1, Line2D([], [], color=TARGET, linestyle=":", linewidth=1.4))
        labels.insert(1, target_label)
    if handles:
        legend = axes.legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=len(handles),
            frameon=False,
            fontsize=8.5,
            labelcolor=MUTED,
            borderaxespad=0.3,
            borderpad=0.2,
            handlelength=1.6,
            columnspacing=1.4,
        )
        # The title's pad makes the room; a wide row must not narrow the axes.
        legend.set_in_layout(False)
