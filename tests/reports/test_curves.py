"""The picture is drawn for every kind of run, and phases are what the update lines say."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageColor

from adapipe.reports.curves import SHADES, draw_curves
from adapipe.training.summary import Phase, phases

Record = dict[str, Any]
SECONDS = {"sync": 0.5, "async": 0.25}


def run(plan: Sequence[tuple[str, int]], *, evaluate_every: int = 10) -> list[Record]:
    """The records of a run that learns, in the given phases."""
    update, seconds = 0, 0.0
    records = [evaluation(0, plan[0][0], 0.0)]
    for mode, updates in plan:
        for _ in range(updates):
            update, seconds = update + 1, seconds + SECONDS[mode]
            records.append({"update": update, "mode": mode, "training_seconds": seconds, "loss": loss_after(update)})
            if update % evaluate_every == 0:
                records.append(evaluation(update, mode, seconds))
    return records


def loss_after(update: int) -> float:
    return 2 + 3.5 * math.exp(-update / 50)


def evaluation(update: int, mode: str, seconds: float) -> Record:
    loss = loss_after(update)
    return {
        "update": update,
        "mode": mode,
        "training_seconds": seconds,
        "held_out_loss": loss,
        "held_out_perplexity": math.exp(loss),
    }


def changed(records: list[Record], **values: object) -> list[Record]:
    """The records with some values replaced wherever they occur."""
    return [{key: values.get(key, value) for key, value in record.items()} for record in records]


def draw(records: Sequence[Record], path: Path, **options: Any) -> NDArray[np.uint8]:
    """The pixels of the picture. No warning is allowed: a user would see it on the terminal."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_curves(records, path, **{"title": "a run", **options})
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def share_of(pixels: NDArray[np.uint8], mode: str) -> float:
    colour = ImageColor.getrgb(SHADES[mode][1])
    return float((pixels == colour).all(axis=-1).mean())


def test_phases_are_runs_of_one_mode() -> None:
    assert phases(run([("sync", 20), ("async", 40), ("sync", 4)])) == [
        Phase("sync", first_update=0, updates=20, seconds=10.0),
        Phase("async", first_update=20, updates=40, seconds=10.0),
        Phase("sync", first_update=60, updates=4, seconds=2.0),
    ]


def test_neighbouring_phases_of_one_mode_are_one() -> None:
    assert phases(run([("sync", 3), ("sync", 5)])) == [Phase("sync", 0, 8, 4.0)]


def test_without_updates_there_are_no_phases() -> None:
    assert phases([]) == []
    assert phases([evaluation(0, "sync", 0.0)]) == []


def test_the_seconds_of_an_unknown_time_fall_to_the_next_update() -> None:
    records = run([("sync", 4)], evaluate_every=100)
    records[2]["training_seconds"] = None
    assert phases(records) == [Phase("sync", 0, 4, 2.0)]


SWITCHING = run([("sync", 60), ("async", 200), ("sync", 40)])
EDGE_CASES: dict[str, list[Record]] = {
    "nothing": [],
    "no updates": [evaluation(0, "sync", 0.0)],
    "no evaluations": [record for record in SWITCHING if "loss" in record],
    "one evaluation": run([("async", 5)]),
    "one update": run([("sync", 1)]),
    "one phase": run([("async", 100)]),
    "hundreds of phases": run([("sync", 2), ("async", 3)] * 200),
    "all null": changed(SWITCHING, loss=None, held_out_perplexity=None, held_out_loss=None),
    "all NaN": changed(SWITCHING, loss=math.nan, held_out_perplexity=math.inf),
    "no times": changed(SWITCHING, training_seconds=None),
    "no time passed": changed(SWITCHING, training_seconds=0.0),
    "constant": changed(SWITCHING, loss=2.0, held_out_perplexity=7.0),
    "diverged": [*SWITCHING, {**evaluation(300, "sync", 110.0), "held_out_perplexity": 1e308}],
    "diverged from the start": changed(SWITCHING, loss=1e300, held_out_perplexity=1e308),
    "another mode": changed(SWITCHING, mode="zero-bubble"),
    "hours": [
        {**record, "training_seconds": record["training_seconds"] * 1000}
        for record in SWITCHING
        if "training_seconds" in record
    ],
}


@pytest.mark.parametrize("name", EDGE_CASES)
def test_every_run_gives_a_picture_of_the_same_size(name: str, tmp_path: Path) -> None:
    pixels = draw(EDGE_CASES[name], tmp_path / "curves.png", target_perplexity=20.0)
    assert pixels.shape == (675, 1200, 3)


def test_some_unknown_values_are_left_out(tmp_path: Path) -> None:
    records = [dict(record) for record in SWITCHING]
    for position, hole in ((5, None), (40, math.nan), (70, math.inf)):
        for key in records[position].keys() & {"loss", "held_out_perplexity"}:
            records[position][key] = hole
    draw(records, tmp_path / "curves.png")


def test_the_phases_are_shaded_in_proportion_to_their_time(tmp_path: Path) -> None:
    pixels = draw(SWITCHING, tmp_path / "curves.png")
    # 100 synchronous updates of 0.5 s, 200 asynchronous ones of 0.25 s: half of the time each.
    assert share_of(pixels, "sync") == pytest.approx(share_of(pixels, "async"), rel=0.1)
    assert share_of(pixels, "sync") > 0.2
    only_async = draw(run([("async", 50)]), tmp_path / "one.png")
    assert share_of(only_async, "sync") == 0.0
    assert share_of(only_async, "async") > 0.4


@pytest.mark.parametrize("title", ["", "long " * 50, "a $x_1 title with 50 % _and_ \\alpha$", "x" * 300])
def test_any_title_is_drawn_as_it_is(title: str, tmp_path: Path) -> None:
    draw(SWITCHING, tmp_path / "curves.png", title=title)


@pytest.mark.parametrize("target", [None, -1.0, math.nan, math.inf, 1e-5])
def test_any_target_is_survived(target: float | None, tmp_path: Path) -> None:
    draw(SWITCHING, tmp_path / "curves.png", target_perplexity=target)


def test_the_text_says_clock_units_target_and_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    seen: list[str] = []
    save = Figure.savefig

    def spy(figure: Figure, *arguments: Any, **options: Any) -> None:
        seen.extend(text.get_text() for text in figure.findobj(Text))
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", spy)
    draw(SWITCHING, tmp_path / "curves.png", title="two stages", target_perplexity=20.0, clock="virtual")
    assert {
        "two stages",
        "held-out perplexity",
        "training loss",
        "training time, seconds (virtual clock)",
        "synchronous",
        "asynchronous",
        f"target 20 (reached at {first_reaching(20.0):g} s)",
    } <= set(seen)


def first_reaching(target: float) -> float:
    return next(
        float(record["training_seconds"])
        for record in SWITCHING
        if record.get("held_out_perplexity", math.inf) <= target
    )
