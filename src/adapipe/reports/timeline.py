"""The picture of a schedule: what every stage does when, a panel per pipeline, all on one scale of time."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from adapipe.reports.curves import DOTS_PER_INCH, INK, MUTED, RAW

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]


class Look(NamedTuple):
    """How the bars of one kind of action look."""

    name: str
    colour: str
    ink: str  # of the number on it


# By code, the letters F, B, U, I, W. Hues of the Okabe-Ito palette on evenly spaced steps of lightness, from the black
# update to the light idle time: told apart with any colour vision, and in grey.
LOOKS = (
    Look("forward", "#0067a3", "white"),
    Look("backward", "#f0b53e", INK),
    Look("update", "#111111", "white"),
    Look("input gradient", "#cc79a7", INK),
    Look("weight gradient", "#5c1f45", "white"),
)
IDLE = "#ebebeb"
BACKGROUND = "#ffffff"

# All in pixels. Rows shrink, and stages share a row, before the picture grows beyond HIGHEST.
WIDTH, HIGHEST = 1500, 2100
RIGHT, TOP, BOTTOM, LEGEND, BETWEEN = 45, 20, 80, 34, 22
TITLE_LINE, PANEL_LINE = 28, 24
TALLEST_ROW, LABEL_HEIGHT = 42, 22
# Bars at least this wide have a line between them.
SEPARATED = 5.0
# Heights of an em, from 8 to 5.5 points.
NUMBER_SIZES = (17, 15, 13, 11.5)
# Of DejaVu Sans: the width and the height of each digit, in em.
DIGIT_WIDTH, DIGIT_HEIGHT = 0.636, 0.73
# More numbers than this nobody reads.
NUMBERED_ACTIONS = 20_000


@dataclass(frozen=True, slots=True)
class Panel:
    """One pipeline's actions. All arrays are (stages, actions), each row in the order of execution; a row shorter than
    others is padded with kind -1.

    kinds: position in "FBUIW" (forward, backward, update, gradient of the input, gradient of the weights).
    indices: number of the microbatch, of an update its own. starts, ends: seconds; an action whose times are not
    finite is left out.
    """

    title: str
    kinds: NDArray[np.int8]
    indices: NDArray[np.int64]
    starts: Floats
    ends: Floats


def draw_timeline(
    panels: Sequence[Panel], path: str | os.PathLike[str], *, clock: str, title: str | None = None
) -> None:
    """Draw one PNG, 1500 pixels wide, with a panel for every pipeline: a row per stage, a bar per action.

    Every panel begins at 0 with its earliest action. `clock` names the kind of time ("wall" or "virtual"). Where
    actions are too narrow to be told apart, a pixel mixes their colours by their share of its time.

    Raises ValueError without panels, or for a panel without actions or with arrays that do not fit together.
    """
    # The canvas is used directly, without pyplot: no global state, and no display is ever looked for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not panels:
        raise ValueError("a timeline needs at least one panel")
    panels = [from_zero(panel) for panel in panels]
    layout = layout_of(panels, title)
    longest = max(map(_length, panels))
    if longest < 1e-12:  # no time passes, but a picture needs some scale
        longest = 1e-6
    seconds_per_pixel = longest / layout.width

    figure = Figure(figsize=(WIDTH / DOTS_PER_INCH, layout.height / DOTS_PER_INCH), dpi=DOTS_PER_INCH)
    FigureCanvasAgg(figure)
    numbered = False
    for panel, bottom in zip(panels, layout.bottoms, strict=True):
        colours = stage_rows(panel, layout.width, seconds_per_pixel, layout.stages_per_row)
        _draw_pixels(figure, pixel_rows(colours, layout.row, layout.gap), layout.left, bottom)
        numbered |= _draw_numbers(figure, panel, layout, bottom, seconds_per_pixel)
    _draw_axes(figure, layout, longest, clock)
    _draw_texts(figure, panels, layout, longest, title)
    _legend(figure, panels, layout, _note(panels, numbered, seconds_per_pixel))

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH, pil_kwargs={"compress_level": 1})


def from_zero(panel: Panel) -> Panel:
    """The panel with its earliest start at 0, and kind -1 and times NaN wherever there is no action with known times.

    Raises ValueError if the arrays do not fit together, or if no action is left.
    """
    shape = panel.kinds.shape
    arrays = (panel.indices, panel.starts, panel.ends)
    if len(shape) != 2 or any(array.shape != shape for array in arrays):
        found = ", ".join(str(array.shape) for array in (panel.kinds, *arrays))
        raise ValueError(f"panel {panel.title!r}: kinds, indices, starts and ends must be (stages, actions): {found}")
    if panel.kinds.max(initial=-1) >= len(LOOKS):
        raise ValueError(f"panel {panel.title!r}: kinds must be below {len(LOOKS)}, got {panel.kinds.max()}")
    known = (panel.kinds >= 0) & np.isfinite(panel.starts) & np.isfinite(panel.ends)
    if not known.any():
        raise ValueError(f"panel {panel.title!r} has no actions with known times")
    zero = panel.starts[known].min()
    starts, ends = (np.where(known, times - zero, np.nan) for times in (panel.starts, panel.ends))
    return Panel(panel.title, np.where(known, panel.kinds, -1).astype(np.int8), panel.indices, starts, ends)


def _length(panel: Panel) -> float:
    """Seconds from 0 to the last end."""
    return max(0.0, float(np.nanmax(panel.ends)))


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit that gives readable numbers: its symbol, and how many seconds it has."""
    if seconds >= 1:
        return "s", 1.0
    return ("ms", 1e-3) if seconds >= 1e-3 else ("µs", 1e-6)


# --- Where everything is. ---


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything is, in pixels; bottoms are those of the panels, counted from the bottom of the picture."""

    height: int
    left: int
    width: int  # of the panels
    row: int
    stages_per_row: int
    bottoms: list[int]
    heights: list[int]

    @property
    def gap(self) -> int:
        """What of a row is left free below its bars."""
        return 0 if self.row < 4 else max(1, self.row // 12)


def layout_of(panels: Sequence[Panel], title: str | None) -> Layout:
    """Rows as tall as fit, the same in all panels."""
    stages = [len(panel.kinds) for panel in panels]
    heads = [PANEL_LINE * len(_panel_title(panel)) + BETWEEN for panel in panels]
    top = TOP + TITLE_LINE * len(_main_title(title)) + LEGEND
    free = max(HIGHEST - top - sum(heads) - BOTTOM, 50 * len(panels))
    row, stages_per_row = row_height(stages, free)
    heights = [-(-count // stages_per_row) * row for count in stages]
    height = top + sum(heads) + sum(heights) + BOTTOM
    down = top + np.cumsum([head + rows for head, rows in zip(heads, heights, strict=True)])
    left = 95 + 11 * len(str(max(stages) - 1))
    return Layout(height, left, WIDTH - left - RIGHT, row, stages_per_row, (height - down).tolist(), heights)


def row_height(stages: Sequence[int], free: int) -> tuple[int, int]:
    """Pixels of a row, and stages that share one, when panels of so many stages have `free` pixels in all."""
    row = min(TALLEST_ROW, free // sum(stages))
    if row:
        return row, 1
    return 1, next(share for share in range(2, max(stages) + 2) if sum(-(-n // share) for n in stages) <= free)


def labelled_stages(stages: int, pixels_per_stage: float) -> list[int]:
    """Every stage if there is room, else every second, fifth, tenth ..., and always the last."""
    steps = (step * 10**power for power in range(9) for step in (1, 2, 5))
    step = next(step for step in steps if step * pixels_per_stage >= LABEL_HEIGHT)
    found = [stage for stage in range(0, stages, step) if (stages - 1 - stage) * pixels_per_stage >= LABEL_HEIGHT]
    return [*found, stages - 1]


def _main_title(title: str | None) -> list[str]:
    return textwrap.wrap(title or "", 92)


def _panel_title(panel: Panel) -> list[str]:
    return textwrap.wrap(panel.title, 100) or [""]


# --- The bars, as pixels. ---


def stage_rows(panel: Panel, columns: int, seconds: float, stages_per_row: int = 1) -> Floats:
    """(rows, columns, 3) colours from 0 to 255; a column has so many seconds, the first begins at 0.

    Stages that share a row are averaged. After the panel's last end there is background.
    """
    rows = np.zeros((-(-len(panel.kinds) // stages_per_row), columns, 3))
    for stage, actions in enumerate(zip(panel.kinds, panel.starts, panel.ends, strict=True)):
        rows[stage // stages_per_row] += stage_colours(*actions, columns, seconds)
    rows /= np.bincount(np.arange(len(panel.kinds)) // stages_per_row)[:, None, None]
    beyond = np.clip(np.arange(1, columns + 1) - _length(panel) / seconds, 0, 1)
    rows += beyond[:, None] * (_rgb(BACKGROUND) - _rgb(IDLE))
    return rows


def stage_colours(kinds: NDArray[np.int8], starts: Floats, ends: Floats, columns: int, seconds: float) -> Floats:
    """(columns, 3) colours of one stage's (actions,): in each column of so many seconds, exactly what it does in that
    time, mixed by its share.

    The last column's worth of a bar wide enough for it shows background, which separates it from the next.
    """
    idle = _rgb(IDLE)
    known = kinds >= 0
    kinds, starts, ends = kinds[known], starts[known], ends[known]
    if not len(kinds):
        return np.tile(idle, (columns, 1))
    lines = np.where(ends - starts >= SEPARATED * seconds, seconds, 0.0)
    # Three pieces an action: its bar, the line after it, and idle time until the next one. Times never run back, even
    # if clocks do.
    times = np.maximum.accumulate(np.stack([starts, ends - lines, ends], axis=1).ravel())
    pieces = np.zeros((3, len(kinds), 3))  # channels, actions, pieces; relative to idle
    pieces[:, :, 0] = np.array([_rgb(look.colour) - idle for look in LOOKS]).T[:, kinds]
    pieces[:, :, 1] = (_rgb(BACKGROUND) - idle)[:, None]
    shown = pieces.reshape(3, -1)
    # The integral of what is shown, until each time and then until each edge; a column has the difference of its edges.
    until = np.zeros_like(shown)
    np.cumsum(shown[:, :-1] * np.diff(times), axis=1, out=until[:, 1:])
    edges = np.arange(columns + 1) * seconds
    piece = np.maximum(np.searchsorted(times, edges, side="right") - 1, 0)
    at_edges = until[:, piece] + shown[:, piece] * np.maximum(edges - times[piece], 0)
    mixed: Floats = idle + (np.diff(at_edges) / seconds).T
    return mixed


def pixel_rows(colours: Floats, row: int, gap: int) -> NDArray[np.uint8]:
    """Rows of one pixel made `row` pixels tall, the last `gap` of them background."""
    pixels = np.repeat(np.rint(colours).astype(np.uint8), row, axis=0)
    for line in range(gap):
        pixels[row - 1 - line :: row] = _rgb(BACKGROUND)
    return pixels


def _draw_pixels(figure: Figure, pixels: NDArray[np.uint8], left: int, bottom: int) -> None:
    """Every pixel as it is. An image of matplotlib would be resampled first, in more time than all the rest takes."""
    from matplotlib.artist import Artist
    from matplotlib.backend_bases import RendererBase

    opaque = np.dstack([pixels, np.full(pixels.shape[:2], 255, np.uint8)])

    class Pixels(Artist):
        def draw(self, renderer: RendererBase) -> None:
            renderer.draw_image(renderer.new_gc(), left, bottom, opaque[::-1])

    figure.add_artist(Pixels())


def _rgb(colour: str) -> Floats:
    """The three channels of "#rrggbb", from 0 to 255."""
    return np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)], dtype=np.float64)


# --- The numbers on the bars. ---


def digits_of(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many digits each number (0 or more) has."""
    return np.searchsorted(10 ** np.arange(1, 19), numbers, side="right") + 1


def fitting(panel: Panel, seconds_per_pixel: float, size: float) -> NDArray[np.bool_]:
    """(stages, actions): whose number, `size` pixels to the em, has its bar's width and a pixel free on each side."""
    widths = np.where(panel.kinds >= 0, panel.ends - panel.starts, 0.0) / seconds_per_pixel
    return (panel.kinds >= 0) & (panel.indices >= 0) & (widths >= digits_of(panel.indices) * DIGIT_WIDTH * size + 3)


def number_size(panel: Panel, seconds_per_pixel: float, bar_height: int) -> float | None:
    """The largest size (pixels to the em) at which nearly all numbers fit that fit at any. None if none fits."""
    if (panel.kinds >= 0).sum() > NUMBERED_ACTIONS:
        return None
    sizes = [size for size in NUMBER_SIZES if DIGIT_HEIGHT * size + 2 <= bar_height]
    counts = [int(fitting(panel, seconds_per_pixel, size).sum()) for size in sizes]
    most = max(counts, default=0)
    return next((size for size, count in zip(sizes, counts, strict=True) if most and count >= 0.9 * most), None)


def split_digits(numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """All digits of all numbers in a row: which number each is of, its place in it from the left, and the digit."""
    counts = digits_of(numbers)
    number = np.repeat(np.arange(len(numbers)), counts)
    place = np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts, counts)
    return number, place, numbers[number] // 10 ** (counts[number] - 1 - place) % 10


def _draw_numbers(figure: Figure, panel: Panel, layout: Layout, bottom: int, seconds_per_pixel: float) -> bool:
    """Write the numbers that fit, as one collection of digits: thousands of texts would take seconds.

    Returns whether there are any.
    """
    from matplotlib.collections import PathCollection
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath
    from matplotlib.transforms import IdentityTransform

    bar_height = layout.row - layout.gap
    size = number_size(panel, seconds_per_pixel, bar_height) if layout.stages_per_row == 1 else None
    if size is None:
        return False
    stages, actions = np.nonzero(fitting(panel, seconds_per_pixel, size))
    numbers = panel.indices[stages, actions]
    middle = (panel.starts + panel.ends)[stages, actions] / 2 / seconds_per_pixel
    # The line after the bar is no part of it.
    x = layout.left + middle - 0.5 - digits_of(numbers) * DIGIT_WIDTH * size / 2
    y = bottom + (len(panel.kinds) - stages) * layout.row - (bar_height + DIGIT_HEIGHT * size) / 2
    number, place, digits = split_digits(numbers)
    font = FontProperties(family="DejaVu Sans")
    glyphs = [TextPath((0, 0), digit, size=size, prop=font) for digit in "0123456789"]
    written = PathCollection(
        [glyphs[digit] for digit in digits],
        offsets=np.rint(np.stack([x[number] + place * DIGIT_WIDTH * size, y[number]], axis=1)),
        offset_transform=IdentityTransform(),
        facecolors=[LOOKS[kind].ink for kind in panel.kinds[stages, actions][number]],
        linewidths=0,
    )
    # Already in pixels.
    written.set_transform(IdentityTransform())
    figure.add_artist(written)
    return True


# --- What is around them. ---


def _draw_axes(figure: Figure, layout: Layout, longest: float, clock: str) -> None:
    """Axes over every panel's pixels; the lowest ones name the times."""
    unit, seconds_per_unit = time_unit(longest)
    for bottom, height in zip(layout.bottoms, layout.heights, strict=True):
        lowest = bottom == layout.bottoms[-1]
        axes = figure.add_axes(
            (layout.left / WIDTH, bottom / layout.height, layout.width / WIDTH, height / layout.height)
        )
        axes.patch.set_visible(False)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(RAW)
        axes.tick_params(colors=MUTED, labelsize=8.5)
        axes.tick_params(axis="x", labelbottom=lowest)
        axes.set_xlim(0, longest / seconds_per_unit)
        axes.set_yticks([])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        if lowest:
            axes.set_xlabel(f"time, {unit} ({clock} clock)", color=MUTED)


def _draw_texts(figure: Figure, panels: Sequence[Panel], layout: Layout, longest: float, title: str | None) -> None:
    """The title; above each panel its own, and how long it takes; beside it its stages."""
    unit, seconds_per_unit = time_unit(longest)

    def write(text: str, x: float, y: float, **look: Any) -> None:
        figure.text(x / WIDTH, y / layout.height, text, parse_math=False, **look)

    for number, line in enumerate(_main_title(title)):
        below = TOP + number * TITLE_LINE
        write(line, layout.left, layout.height - below, va="top", fontsize=11, fontweight="bold", color=INK)
    for panel, bottom, height in zip(panels, layout.bottoms, layout.heights, strict=True):
        top, lines = bottom + height, _panel_title(panel)
        for number, line in enumerate(lines):
            write(line, layout.left, top + (len(lines) - number) * PANEL_LINE, va="top", fontsize=9, color=INK)
        takes = f"{short(_length(panel) / seconds_per_unit)} {unit}"
        write(takes, WIDTH - RIGHT, top + PANEL_LINE, va="top", ha="right", fontsize=9, color=MUTED)
        # Not as ticks, each of which takes milliseconds.
        pitch = layout.row / layout.stages_per_row
        for stage in labelled_stages(len(panel.kinds), pitch):
            y = top - (stage + 0.5) * pitch + layout.gap / 2
            write(f"stage {stage}", layout.left - 8, y, va="center_baseline", ha="right", fontsize=8.5, color=MUTED)


def short(value: float) -> str:
    """At most four digits, or all those before the point."""
    return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"


def _note(panels: Sequence[Panel], numbered: bool, seconds_per_pixel: float) -> str:
    """What a reader must know beyond the legend."""
    narrow = any(float(np.nanmedian(panel.ends - panel.starts)) < 2 * seconds_per_pixel for panel in panels)
    if narrow:
        return "pixels mix the actions within them"
    return "numbers: microbatch, or update" if numbered else ""


def _legend(figure: Figure, panels: Sequence[Panel], layout: Layout, note: str) -> None:
    """A row under the title, where it can cover nothing."""
    from matplotlib.patches import Patch

    present = np.unique(np.concatenate([np.unique(panel.kinds) for panel in panels]))
    handles = [Patch(color=LOOKS[code].colour, label=LOOKS[code].name) for code in present if code >= 0]
    handles.append(Patch(facecolor=IDLE, edgecolor=RAW, linewidth=0.4, label="idle"))
    top = layout.bottoms[0] + layout.heights[0] + PANEL_LINE * len(_panel_title(panels[0])) + BETWEEN
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(layout.left / WIDTH, top / layout.height),
        ncols=len(handles),
        frameon=False,
        fontsize=8.5,
        labelcolor=MUTED,
        borderaxespad=0,
        borderpad=0,
        handlelength=1.6,
        columnspacing=1.4,
    )
    figure.text((WIDTH - RIGHT) / WIDTH, top / layout.height, note, ha="right", va="bottom", fontsize=8.5, color=MUTED)
