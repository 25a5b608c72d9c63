"""Every pixel of a timeline is what a stage does in that time, numbers stay in their bars, and no texts collide."""

from __future__ import annotations

import itertools
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageColor

from adapipe.reports import timeline
from adapipe.reports.curves import DOTS_PER_INCH
from adapipe.reports.timeline import IDLE, LOOKS, Panel, draw_timeline, layout_of
from adapipe.schedule import segment_orders

F, B, U, I, W = range(5)  # noqa: E741
FORWARD, BACKWARD, UPDATE = (ImageColor.getrgb(LOOKS[code].colour) for code in (F, B, U))
NO_WORK, WHITE = ImageColor.getrgb(IDLE), (255, 255, 255)


def panel(*rows: Sequence[tuple[int, int, float, float]], title: str = "a pipeline") -> Panel:
    """A panel from (kind, index, start, end) of the actions of each stage."""
    longest = max(map(len, rows))
    padded = [[*row, *[(-1, -1, np.nan, np.nan)] * (longest - len(row))] for row in rows]
    columns = np.array(padded, dtype=np.float64).reshape(len(rows), longest, 4).transpose(2, 0, 1)
    return Panel(title, columns[0].astype(np.int8), columns[1].astype(np.int64), columns[2], columns[3])


def pipeline(stages: int, microbatches: int, segments: int, updates: int, **seconds: float) -> Panel:
    """1F1B: so many segments, each of so many updates and then a flush. `seconds`: F, B, U (1, 2 and 0.5)."""
    lasts = {"F": 1.0, "B": 2.0, "U": 0.5, **seconds}
    orders = [
        list(itertools.chain.from_iterable(parts))
        for parts in zip(
            *(segment_orders(stages, microbatches, updates, first_update=n * updates) for n in range(segments)),
            strict=True,
        )
    ]
    rows: list[list[tuple[int, int, float, float]]] = [[] for _ in orders]
    done: dict[tuple[str, int, int], float] = {}
    while any(len(row) < len(order) for row, order in zip(rows, orders, strict=True)):
        for stage, (row, order) in enumerate(zip(rows, orders, strict=True)):
            while len(row) < len(order):
                letter, index = order[len(row)].kind.value, order[len(row)].index
                source = stage + {"F": -1, "B": 1, "U": stages}[letter]
                if 0 <= source < stages and (letter, source, index) not in done:
                    break
                start = max(row[-1][3] if row else 0.0, done.get((letter, source, index), 0.0))
                done[letter, stage, index] = start + lasts[letter]
                row.append(("FBU".index(letter), index, start, start + lasts[letter]))
    return panel(*rows)


def titled(drawn: Panel, title: str) -> Panel:
    return Panel(title, drawn.kinds, drawn.indices, drawn.starts, drawn.ends)


def scaled(drawn: Panel, factor: float, shift: float = 0.0) -> Panel:
    return Panel(drawn.title, drawn.kinds, drawn.indices, drawn.starts * factor + shift, drawn.ends * factor + shift)


def draw(path: Path, *panels: Panel, **options: Any) -> NDArray[np.uint8]:
    """The pixels of the picture. No warning is allowed: a user would see it on the terminal."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_timeline(panels, path, **{"clock": "wall", **options})
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def colours(row: NDArray[np.uint8]) -> list[tuple[tuple[int, ...], int]]:
    """The runs of one colour in a row of pixels, and their lengths."""
    return [(colour, len(list(run))) for colour, run in itertools.groupby(map(tuple, row.tolist()))]


def mixed(*parts: tuple[float, tuple[int, ...]]) -> list[float]:
    return [sum(share * colour[channel] for share, colour in parts) for channel in range(3)]


SYNC, ASYNC = titled(pipeline(4, 4, 4, 1), "synchronous"), titled(pipeline(4, 4, 1, 4), "asynchronous")
ONE = panel([(F, 0, 0.0, 1.0), (B, 0, 2.0, 4.0)])
MANY_STAGES = panel(*[[(F, 0, stage, stage + 1), (B, 0, 5000 - stage, 5002 - stage)] for stage in range(2500)])
LONG = panel([(number % 2, number // 2, number, number + 1) for number in range(30_000)])
EDGE_CASES: dict[str, list[Panel]] = {
    "two": [SYNC, ASYNC],
    "one action": [panel([(F, 0, 3.0, 4.0)])],
    "no time passes": [panel([(F, 0, 3.0, 3.0), (U, 0, 3.0, 3.0)])],
    "no time passes in one": [ONE, panel([(F, 0, 3.0, 3.0)])],
    "updates cost nothing": [pipeline(4, 4, 1, 3, U=0.0)],
    "an idle stage": [panel([(F, 0, 0, 1)], [])],
    "unknown times": [panel([(F, 0, 0, 1), (B, 0, 2, np.nan)], [(F, 0, np.nan, np.nan), (B, 0, 1, np.inf)])],
    "a clock that runs back": [panel([(F, 0, 0, 5), (B, 0, 4, 2), (F, 1, 1, 3), (B, 1, 7, 6)])],
    "a number that cannot be": [panel([(F, -7, 0, 1), (F, 2**62, 1, 2), (F, 0, 2, 3)])],
    "five kinds": [panel([(code, code, code, code + 1) for code in range(5)])],
    "microseconds": [scaled(SYNC, 1e-6)],
    "days": [scaled(SYNC, 1e5, shift=1e9)],
    "three, of all sizes": [SYNC, pipeline(64, 2, 1, 2), ONE],
    "many panels": [titled(ONE, str(number)) for number in range(45)],
    "more stages than pixels": [MANY_STAGES],
    "more stages than pixels, twice": [MANY_STAGES, MANY_STAGES],
    "more actions than pixels": [LONG],
    "any title": [titled(ONE, "x" * 300), titled(ONE, "50 % of $x_1 and \\nothing$ " * 10), titled(ONE, "")],
}


@pytest.mark.parametrize("name", EDGE_CASES)
def test_every_timeline_is_drawn_and_its_texts_neither_collide_nor_leave_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes = written(monkeypatch)
    pixels = draw(tmp_path / "timeline.png", *EDGE_CASES[name], title="a timeline " * 15)
    height, width, _ = pixels.shape
    assert width == 1500
    assert 200 <= height <= 2100 or name == "many panels"
    for text, box in boxes:
        assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= 0, text
        assert box.x1 <= width, text
        assert box.y1 <= height, text
    for (one, box), (other, another) in itertools.combinations(boxes, 2):
        assert not box.padded(-1).overlaps(another.padded(-1)), f"{one!r} covers {other!r}"


def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Every text that the next pictures draw, with its box in pixels."""
    from matplotlib.text import Text

    found: list[tuple[str, Any]] = []
    draw_text = Text.draw

    def spy(text: Text, renderer: Any) -> None:
        draw_text(text, renderer)
        if text.get_visible() and text.get_text():
            found.append((text.get_text(), text.get_window_extent(renderer)))

    monkeypatch.setattr(Text, "draw", spy)
    return found


def test_the_text_says_clock_unit_titles_stages_kinds_and_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = written(monkeypatch)
    draw(tmp_path / "a.png", scaled(SYNC, 1e-3), scaled(ASYNC, 1e-3), clock="virtual", title="two modes")
    texts = [text for text, _ in found]
    assert {"two modes", "synchronous", "asynchronous", "time, ms (virtual clock)", "86 ms", "59 ms"} <= set(texts)
    assert [text for text in texts if text.startswith("stage")] == [f"stage {s}" for s in (0, 1, 2, 3)] * 2
    assert {"forward", "backward", "update", "idle", "numbers: microbatch, or update"} <= set(texts)
    assert not {"input gradient", "weight gradient"} & set(texts)

    found.clear()
    draw(tmp_path / "b.png", LONG)
    assert {"forward", "backward", "pixels mix the actions within them"} <= {text for text, _ in found}
    assert not {"update", "numbers: microbatch, or update"} & {text for text, _ in found}

    # What is padded, and what ends before it began.
    found.clear()
    draw(tmp_path / "c.png", panel([(F, 0, 3.0, 2.0)], []))
    assert {"0 µs", "forward"} <= {text for text, _ in found}
    assert "weight gradient" not in {text for text, _ in found}


def test_every_pixel_is_what_its_stage_does_in_its_time(tmp_path: Path) -> None:
    # Times do not start at 0, and the second panel takes half as long.
    first = panel([(F, 0, 10.0, 11.0), (B, 0, 12.0, 14.0)], [(U, 3, 11.0, 12.0)])
    second = panel([(B, 0, 5.0, 7.0)])
    pixels = draw(tmp_path / "a.png", first, second)
    layout = layout_of([first, second], None)
    assert pixels.shape == (layout.height, 1500, 3)
    quarter, bar = layout.width / 4, layout.row - layout.gap
    upper, lower = (
        pixels[layout.height - bottom - height :][:height, layout.left : layout.left + layout.width]
        for bottom, height in zip(layout.bottoms, layout.heights, strict=True)
    )
    expected = {
        0: [(FORWARD, 1), (NO_WORK, 1), (BACKWARD, 2)],
        1: [(NO_WORK, 1), (UPDATE, 1), (NO_WORK, 2)],
    }
    for stage, runs in expected.items():
        for line in (stage * layout.row, stage * layout.row + bar - 1):  # above and below the number
            # Edges between pixels are mixed, and bars end with a line.
            found = [(colour, length) for colour, length in colours(upper[line]) if length > 2]
            assert [colour for colour, _ in found] == [colour for colour, _ in runs]
            for (_, length), (_, quarters) in zip(found, runs, strict=True):
                assert length == pytest.approx(quarters * quarter, abs=3)
        assert (upper[stage * layout.row + bar : (stage + 1) * layout.row - 1] == 255).all()
    (busy, length), (after, rest) = [run for run in colours(lower[0]) if run[1] > 2]
    assert (busy, after) == (BACKWARD, WHITE)
    assert (length, rest) == pytest.approx((2 * quarter, 2 * quarter), abs=2)


def test_a_column_mixes_what_is_done_in_it_by_its_share() -> None:
    kinds, starts, ends = (np.array(x) for x in ([F, B, U, -1, B], [0.0, 1.5, 3.0, 0, 3.25], [1.0, 2.75, 3.25, 9, 4.0]))
    found = timeline.stage_colours(kinds.astype(np.int8), starts, ends, columns=6, seconds=1.0)
    expected = [
        mixed((1, FORWARD)),
        mixed((0.5, NO_WORK), (0.5, BACKWARD)),
        mixed((0.75, BACKWARD), (0.25, NO_WORK)),
        mixed((0.25, UPDATE), (0.75, BACKWARD)),
        mixed((1, NO_WORK)),
        mixed((1, NO_WORK)),
    ]
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_actions_narrower_than_a_column_are_mixed_as_well() -> None:
    actions = 3000
    kinds = np.tile(np.array([F, B, U], np.int8), actions // 3)
    ends = np.cumsum(np.tile([0.5, 0.25, 0.0], actions // 3))
    starts = ends - np.tile([0.25, 0.25, 0.0], actions // 3)
    found = timeline.stage_colours(kinds, starts, ends, columns=5, seconds=150.0)
    np.testing.assert_allclose(found, [mixed((1 / 3, FORWARD), (1 / 3, BACKWARD), (1 / 3, NO_WORK))] * 5, atol=1e-6)


def test_an_action_begins_when_the_one_before_has_ended_whatever_its_clock_says() -> None:
    kinds, starts, ends = np.array([F, B, U], np.int8), np.array([0.0, 1.0, 1.5]), np.array([2.0, 3.0, 2.5])
    found = timeline.stage_colours(kinds, starts, ends, columns=4, seconds=1.0)
    np.testing.assert_allclose(found, [FORWARD, FORWARD, BACKWARD, NO_WORK], atol=1e-9)


def test_a_line_ends_each_bar_that_is_wide_enough() -> None:
    kinds, starts, ends = np.array([F, F, B], np.int8), np.array([0.0, 5.0, 10.0]), np.array([5.0, 10.0, 14.5])
    found = timeline.stage_colours(kinds, starts, ends, columns=15, seconds=1.0)
    last = mixed((0.5, BACKWARD), (0.5, NO_WORK))
    expected = [*[FORWARD] * 4, WHITE, *[FORWARD] * 4, WHITE, *[BACKWARD] * 4, last]
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_stages_that_share_a_row_are_averaged() -> None:
    three = timeline.from_zero(panel([(F, 0, 0, 2)], [(B, 0, 0, 1)], [(U, 0, 1, 2)]))
    found = timeline.stage_rows(three, columns=3, seconds=1.0, stages_per_row=2)
    expected = [
        [mixed((0.5, FORWARD), (0.5, BACKWARD)), mixed((0.5, FORWARD), (0.5, NO_WORK)), mixed((1, WHITE))],
        [mixed((1, colour)) for colour in (NO_WORK, UPDATE, WHITE)],
    ]
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_rows_of_pixels_end_with_a_gap() -> None:
    found = timeline.pixel_rows(np.array([[[1.4, 2, 3]], [[4, 5, 5.6]]]), row=3, gap=1)
    assert found[:, 0].tolist() == [[1, 2, 3], [1, 2, 3], [255] * 3, [4, 5, 6], [4, 5, 6], [255] * 3]


def test_padding_and_unknown_times_are_left_out_and_the_earliest_start_is_zero() -> None:
    found = timeline.from_zero(
        panel([(F, 0, 7.0, 8.0), (B, 0, 9.0, np.nan)], [(F, 0, 6.0, 7.0)], [(F, 0, -np.inf, 1.0), (-1, 0, 1.0, 2.0)])
    )
    assert found.kinds.tolist() == [[F, -1], [F, -1], [-1, -1]]
    np.testing.assert_array_equal(found.starts, [[1, np.nan], [0, np.nan], [np.nan] * 2])
    np.testing.assert_array_equal(found.ends, [[2, np.nan], [1, np.nan], [np.nan] * 2])


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    path, nothing = tmp_path / "none.png", panel([(-1, 0, 0.0, 1.0)], title="empty one")
    no_stages = Panel("empty one", *(np.empty((0, 0), kind) for kind in (np.int8, np.int64, float, float)))
    with pytest.raises(ValueError, match="at least one panel"):
        draw(path)
    for empty in (nothing, no_stages, panel([(F, 0, np.nan, 1.0)], title="empty one")):
        with pytest.raises(ValueError, match="'empty one' has no actions with known times"):
            draw(path, SYNC, empty)
    with pytest.raises(ValueError, match=r"'a pipeline': .* \(1, 2\), \(1, 2\), \(1, 1\), \(1, 2\)"):
        draw(path, Panel(ONE.title, ONE.kinds, ONE.indices, ONE.starts[:, :1], ONE.ends))
    with pytest.raises(ValueError, match="must be below 5, got 5"):
        draw(path, panel([(5, 0, 0.0, 1.0)]))
    assert not path.exists()


def test_a_number_needs_its_width_and_a_pixel_on_each_side() -> None:
    # At 10 pixels to the em a digit is 6.36 wide; a pixel is a millisecond.
    bars = panel(
        [(F, 7, 0, 0.010), (F, 7, 0, 0.009), (F, 10, 0, 0.016), (F, 10, 0, 0.015), (F, -1, 0, 1)],
        [(U, 0, 0, 0.010), (B, 999, 0, 0.023), (B, 1000, 0, 0.023)],
    )
    found = timeline.fitting(bars, seconds_per_pixel=1e-3, size=10)
    assert found.tolist() == [[True, False, True, False, False], [True, True, False, False, False]]


def test_the_size_of_numbers_is_the_largest_at_which_nearly_all_fit() -> None:
    wide, narrow = [(F, 1, 0, 0.030)], [(F, 1, 0, 0.0125)]  # fits 17 and all below; fits 13 and below
    assert timeline.number_size(panel(wide * 10), 1e-3, 40) == 17
    assert timeline.number_size(panel(wide * 9 + narrow), 1e-3, 40) == 17
    assert timeline.number_size(panel(wide * 8 + narrow * 2), 1e-3, 40) == 13
    assert timeline.number_size(panel([(F, 1, 0, 0.001)]), 1e-3, 40) is None
    # The bar's height counts too.
    assert timeline.number_size(panel(wide), 1e-3, 12) == 13
    assert timeline.number_size(panel(wide), 1e-3, 9) is None
    assert timeline.number_size(panel(wide * 20_000), 1e-3, 40) == 17
    assert timeline.number_size(panel(wide * 20_001), 1e-3, 40) is None


def test_a_digit_is_as_large_as_it_is_measured() -> None:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    for digit in "0123456789":
        box = TextPath((0, 0), digit, size=1, prop=FontProperties(family="DejaVu Sans")).get_extents()
        assert 0 <= box.x0 < box.x1 <= timeline.DIGIT_WIDTH
        assert -0.02 <= box.y0 < box.y1 <= timeline.DIGIT_HEIGHT + 0.02


def test_digits_are_those_of_the_numbers() -> None:
    numbers = [0, 7, 9, 10, 305, 99, 1000, 2**62]
    number, place, digits = timeline.split_digits(np.array(numbers))
    assert "".join(map(str, digits)) == "".join(map(str, numbers))
    assert number.tolist() == [n for n, value in enumerate(numbers) for _ in str(value)]
    assert place.tolist() == [p for value in numbers for p in range(len(str(value)))]


def test_numbers_are_in_the_middle_of_their_bars(tmp_path: Path) -> None:
    drawn = panel([(F, 88, 0.0, 1.0), (F, 88, 3.0, 4.0)], [(B, 8, 1.0, 2.0)])
    layout = layout_of([drawn], None)
    pixels = draw(tmp_path / "a.png", drawn)[layout.height - layout.bottoms[0] - layout.heights[0] :]
    pixels = pixels[: layout.heights[0], layout.left : layout.left + layout.width].astype(int)
    quarter, bar = layout.width / 4, layout.row - layout.gap
    for stage, first, colour in ((0, 0, FORWARD), (0, 3, FORWARD), (1, 1, BACKWARD)):
        inside = pixels[stage * layout.row :][:bar, round(first * quarter) + 1 : round((first + 1) * quarter) - 2]
        rows, columns = np.nonzero(np.abs(inside - colour).max(axis=-1) > 60)
        assert len(rows) > 20
        assert (rows.min() + rows.max()) / 2 == pytest.approx((bar - 1) / 2, abs=1.1)
        assert (columns.min() + columns.max()) / 2 == pytest.approx(inside.shape[1] / 2 - 0.5, abs=1.6)
        assert rows.max() - rows.min() == pytest.approx(0.73 * 17, abs=2)
        assert columns.max() - columns.min() == pytest.approx((2 - stage) * 0.636 * 17 - 2, abs=2)


@pytest.mark.parametrize(
    ("seconds", "unit"), [(0, "µs"), (9.99e-4, "µs"), (1e-3, "ms"), (0.999, "ms"), (1, "s"), (1e6, "s")]
)
def test_units(seconds: float, unit: str) -> None:
    symbol, seconds_per_unit = timeline.time_unit(seconds)
    assert (symbol, seconds_per_unit) == (unit, {"µs": 1e-6, "ms": 1e-3, "s": 1.0}[unit])


def test_lengths_are_short() -> None:
    assert [timeline.short(x) for x in (0.0, 0.12344, 59, 999.96, 12378.9)] == ["0", "0.1234", "59", "1000", "12,379"]


def test_rows_shrink_and_then_stages_share_them() -> None:
    assert timeline.row_height([4, 4], 1900) == (timeline.TALLEST_ROW, 1)
    assert timeline.row_height([64, 64], 1900) == (14, 1)
    assert timeline.row_height([1024], 1900) == (1, 1)
    assert timeline.row_height([1024, 1024], 1900) == (1, 2)
    assert timeline.row_height([1000, 4], 502) == (1, 2)
    assert timeline.row_height([1000, 4], 501) == (1, 3)


def test_few_stages_have_rows_of_about_0_28_inch_and_the_picture_ends_at_14_inches() -> None:
    assert layout_of([SYNC], None).row / DOTS_PER_INCH == pytest.approx(0.28)
    rows = [layout_of([pipeline(stages, 1, 1, 1)] * 2, "title") for stages in (1, 8, 16, 32, 64)]
    assert [layout.row for layout in rows] == sorted((layout.row for layout in rows), reverse=True)
    assert all(layout.height <= 14 * DOTS_PER_INCH for layout in rows)


@pytest.mark.parametrize("stages", [1, 2, 3, 10, 64, 65, 1024])
@pytest.mark.parametrize("pitch", [42, 13, 3, 1, 0.5])
def test_stages_are_labelled_where_there_is_room(stages: int, pitch: float) -> None:
    found = timeline.labelled_stages(stages, pitch)
    assert found[-1] == stages - 1
    assert all((after - before) * pitch >= timeline.LABEL_HEIGHT for before, after in itertools.pairwise(found))
    if stages * pitch > 2 * timeline.LABEL_HEIGHT:
        assert found[0] == 0
    if pitch >= timeline.LABEL_HEIGHT:
        assert found == list(range(stages))


def test_all_colours_differ_in_grey() -> None:
    def lightness(colour: str) -> float:
        """L* of CIELAB, from 0 to 100."""
        linear = [
            (x / 255 / 12.92) if x <= 10 else ((x / 255 + 0.055) / 1.055) ** 2.4 for x in ImageColor.getrgb(colour)
        ]
        luminance = float(np.dot(linear, (0.2126, 0.7152, 0.0722)))
        return float(116 * luminance ** (1 / 3) - 16)

    steps = np.diff(sorted(lightness(colour) for colour in (IDLE, *(look.colour for look in LOOKS))))
    assert steps.min() > 15
    for look in LOOKS:
        ink = "#ffffff" if look.ink == "white" else look.ink
        assert abs(lightness(look.colour) - lightness(ink)) > 45


def test_importing_it_loads_neither_torch_nor_matplotlib() -> None:
    code = "import sys, adapipe.reports.timeline; print({'torch', 'matplotlib'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"
