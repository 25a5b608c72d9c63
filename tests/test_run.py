"""`adapipe.train`: the front door, in this process and through real ranks."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import adapipe
from adapipe.engine.world import World
from adapipe.errors import AdaPipeError, ConfigurationError
from adapipe.policy.base import is_evaluation
from adapipe.reports import metrics
from adapipe.reports.metrics import read_metrics
from adapipe.run import Result, count_tokens
from adapipe.schedule.cost import LinkCost, equal_stages, read_cost
from adapipe.schedule.timeline import synchronous_timeline
from adapipe.training.learning_rate import learning_rate_schedule
from tests.engine import toys
from tests.worlds import run_world

HELD_OUT = [toys.batches(10_000 + i) for i in range(3)]
REQUIRED = {
    *("mode", "stages", "microbatches", "updates", "tokens", "seed", "clock", "training_seconds"),
    *("held_out_loss", "held_out_perplexity", "target_perplexity", "seconds_to_target"),
    *("tokens_per_second", "idle_share", "switches", "phases"),
}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def train(blocks: list[nn.Module] | None = None, **options: Any) -> Result:
    arguments: dict[str, Any] = {
        "loss": toys.loss,
        "batches": toys.batches,
        "optimizer": toys.adamw,
        "mode": "sync",
        "stages": 2,
        "microbatches": 2,
        "progress": False,
        **options,
    }
    return adapipe.train(toys.blocks() if blocks is None else blocks, **arguments)


def weights(result: Result) -> dict[str, torch.Tensor]:
    """By name in the whole model."""
    named = [named for module in result.modules for named in module.named_parameters()]
    assert len(named) == len(dict(named)), "names are not unique"
    return {name: parameter.detach().clone() for name, parameter in named}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(out / "metrics.jsonl") if not is_evaluation(line)]


# -- numbers ---------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A user's own block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(width))
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x) * self.gate)


def own_blocks() -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Linear(3, 6), Residual(6), Residual(6), nn.Linear(6, 2)]


def own_batches(microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(microbatch)
    inputs = torch.randn(4, 3, generator=generator)
    return inputs, inputs[:, :2].sin() * 2


def own_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output - targets).square().sum()


def own_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5)


OWN: dict[str, Any] = {"loss": own_loss, "batches": own_batches, "optimizer": own_optimizer}


def plain_loop(updates: int, microbatches: int, clip: float | None) -> tuple[list[float], list[torch.Tensor]]:
    """The same run as anybody would write it."""
    model = nn.Sequential(*own_blocks())
    optimizer = own_optimizer(list(model.parameters()))
    schedule = learning_rate_schedule(0.2, "cosine")
    found = []
    for update in range(updates):
        optimizer.zero_grad()
        data = [own_batches(update * microbatches + k) for k in range(microbatches)]
        elements = sum(targets.numel() for _, targets in data)
        mean = sum(own_loss(model(inputs), targets) for inputs, targets in data) / elements
        mean.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.param_groups[0]["lr"] = 0.01 * schedule((update + 1) / updates)
        optimizer.step()
        found.append(mean.item())
    return found, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(("stages", "clip"), [(1, None), (1, 0.3), (2, 0.3), (3, 0.3), (4, None)])
def test_sync_is_the_plain_training_loop(tmp_path: Path, stages: int, clip: float | None) -> None:
    options = {**OWN, "stages": stages, "microbatches": 3, "updates": 12, "warmup": 0.2, "clip": clip}
    result = train(own_blocks(), out=tmp_path, **options)
    expected, final = plain_loop(12, 3, clip)
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    for got, parameter in zip(weights(result).values(), final, strict=True):
        torch.testing.assert_close(got, parameter, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_modules_together_are_the_whole_model(stages: int, mode: str) -> None:
    blocks = own_blocks()
    result = train(blocks, **OWN, stages=stages, mode=mode, updates=3)
    assert len(result.modules) == stages
    named = weights(result)
    assert list(named) == [f"{i}.{name}" for i, block in enumerate(blocks) for name, _ in block.named_parameters()]
    rebuilt = nn.Sequential(*own_blocks())
    rebuilt.load_state_dict(named)
    inputs = own_batches(99)[0]
    output = inputs
    for module in result.modules:
        output = module.eval()(output)
    assert torch.equal(output, rebuilt.eval()(inputs))
    assert not torch.equal(next(iter(named.values())), next(own_blocks()[0].parameters()))


def test_one_stage_is_the_same_in_both_modes() -> None:
    assert_same(*(weights(train(mode=mode, stages=1, updates=6)) for mode in ("sync", "async")))


def test_two_stages_are_not() -> None:
    sync, asynchronous = (weights(train(mode=mode, stages=2, updates=6)) for mode in ("sync", "async"))
    assert not torch.equal(sync["0.weight"], asynchronous["0.weight"])


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_repeats(mode: str) -> None:
    assert_same(*(weights(train(mode=mode, stages=3, updates=8, held_out=HELD_OUT)) for _ in range(2)))


def test_costs_decide_the_cut() -> None:
    even = train(updates=1, costs=[1, 1, 1, 1])
    heavy = train(updates=1, costs=[9, 1, 1, 1])
    assert [[name for name, _ in module.named_children()] for module in even.modules] == [["0", "1"], ["2", "3"]]
    assert [[name for name, _ in module.named_children()] for module in heavy.modules] == [["0"], ["1", "2", "3"]]


def test_blocks_on_the_meta_device_are_filled_stage_by_stage() -> None:
    filled: list[list[str]] = []  # the blocks of each stage

    def materialise(module: nn.Module) -> None:
        filled.append([name for name, _ in module.named_children()])
        module.to_empty(device="cpu")
        for name, block in module.named_children():
            block.load_state_dict(toys.blocks()[int(name)].state_dict())

    from_meta = weights(train([block.to("meta") for block in toys.blocks()], updates=4, materialise=materialise))
    assert filled == [["0", "1"], ["2", "3"]]
    assert_same(from_meta, weights(train(updates=4)))


def test_weights_tied_within_a_stage_stay_tied() -> None:
    """In async too, where a stage computes with versions of its weights: as one block that uses its weight twice."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(toys.WIDTH, toys.WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(torch.tanh(self.layer(x)))

    def parts() -> tuple[Twice, nn.Linear]:
        torch.manual_seed(3)
        return Twice(), nn.Linear(toys.WIDTH, toys.CLASSES)

    for mode in ("sync", "async"):
        one, head = parts()
        train([one, head], mode=mode, microbatches=1, updates=9, costs=[1, 1])
        twin, other_head = parts()
        tied = nn.Linear(toys.WIDTH, toys.WIDTH)
        tied.weight, tied.bias = twin.layer.weight, twin.layer.bias
        blocks = [twin.layer, nn.Tanh(), tied, other_head]
        train(blocks, mode=mode, microbatches=1, updates=9, costs=[1, 1, 1, 3])
        assert tied.weight is twin.layer.weight
        assert torch.equal(one.layer.weight, tied.weight)
        assert torch.equal(head.weight, other_head.weight)


def test_tokens_are_targets_without_padding() -> None:
    assert count_tokens(torch.tensor([[3, -100, 4], [-100, -100, 0]])) == 3
    assert count_tokens(torch.full((2, 3), -100.0)) == 6
    expected = sum(int((toys.batches(i)[1] != -100).sum()) for i in range(8))
    assert train(updates=4).summary["tokens"] == expected


def test_targets_of_any_kind_with_a_count() -> None:
    def batches(microbatch: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        inputs, targets = toys.batches(microbatch)
        return inputs, {"labels": targets}

    def loss(output: torch.Tensor, targets: dict[str, torch.Tensor]) -> torch.Tensor:
        return toys.loss(output, targets["labels"])

    result = train(batches=batches, loss=loss, count=lambda targets: toys.count(targets["labels"]), updates=5)
    assert_same(weights(result), weights(train(updates=5)))


def test_it_stops_when_interrupted() -> None:
    asked: list[int] = []

    def interrupted() -> bool:
        asked.append(1)
        return len(asked) > 10

    result = train(updates=1000, interrupted=interrupted, held_out=HELD_OUT)
    assert 2 <= result.summary["updates"] < 8
    assert result.summary["held_out_loss"] is not None


# -- arguments that cannot work --------------------------------------------------------------------------------------


def tied_across() -> list[nn.Module]:
    blocks = toys.blocks()
    blocks[3][1].weight = nn.Parameter(torch.zeros(toys.CLASSES, toys.WIDTH))  # type: ignore[index]
    first = nn.Linear(toys.WIDTH, toys.CLASSES)
    first.weight = blocks[3][1].weight  # type: ignore[index]
    return [first, *blocks[1:]]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mode": "adaptive"}, "held_out"),
        ({"mode": "adaptive", "held_out": []}, "held_out"),
        ({"mode": "asinc"}, "--mode asinc"),
        ({"plan": "sync:0"}, "--plan"),
        ({"microbatches": 0}, "--microbatches 0"),
        ({"updates": None}, "--updates or --seconds"),
        ({"seconds": 5.0}, "--updates or --seconds"),
        ({"updates": 0}, "--updates 0"),
        ({"warmup": 1.5}, "--warmup 1.5"),
        ({"decay": "step"}, "--decay step"),
        ({"clip": 0.0}, "--clip 0"),
        ({"evaluate_every": 0}, "--evaluate-every 0"),
        ({"target_perplexity": 0.5, "held_out": HELD_OUT}, "--target-perplexity 0.5"),
        ({"precision": "fp16"}, "--precision fp16"),
        ({"stages": 5}, "5 stages need at least 5 blocks, but the model has 4"),
        ({"stages": 0}, "0 stages"),
        ({"costs": [1, 1, 1, math.nan]}, "block 3 has cost nan"),
        # Sets of arguments that would otherwise fail late, or train something else than asked for.
        ({"costs": [1, 1, 1]}, "cost"),
        ({"costs": [1, 1, 1, 1, 1]}, "cost"),
        ({"held_out": []}, "held_out"),
        ({"target_perplexity": 5.0}, "held_out"),
        ({"in_flight": 0}, "--in-flight 0"),
        ({"timeline": range(3, 3)}, "timeline range(3, 3) names no updates"),
        ({"timeline": range(-1, 3)}, "timeline range(-1, 3)"),
        ({"timeline": range(0, 9, 3)}, "timeline range(0, 9, 3)"),
        ({"emulate": equal_stages(3, 1, 1)}, "the cost model is of 3 stages, the pipeline has 2"),
    ],
)
def test_arguments_that_cannot_work_are_refused_in_one_line(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        train(**{"updates": 3, **changes})
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_no_blocks_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="the model has 0"):
        train([], stages=None, updates=1)


def test_weights_tied_across_stages_are_refused() -> None:
    with pytest.raises(ConfigurationError) as refused:
        train(tied_across(), updates=1)
    message = str(refused.value)
    assert "3.1.weight on stage 1 is the same parameter as 0.weight on stage 0" in message
    assert "\n" not in message


@pytest.mark.parametrize("held_out", [None, HELD_OUT])
def test_targets_that_cannot_be_counted_need_a_count(held_out: Any) -> None:
    def batches(microbatch: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        inputs, targets = toys.batches(microbatch)
        return inputs, {"labels": targets}

    with pytest.raises(ConfigurationError) as refused:
        train(
            batches=batches,
            loss=lambda output, targets: toys.loss(output, targets["labels"]),
            held_out=held_out and [batches(0)],
            updates=1,
        )
    assert "give `count`" in str(refused.value)


def test_held_out_data_without_a_token_is_refused_by_name() -> None:
    inputs, targets = toys.batches(0)
    with pytest.raises(AdaPipeError, match=r"held.out"):
        train(held_out=[(inputs, torch.full_like(targets, -100))], updates=1)


@pytest.mark.parametrize(("stages", "ranks"), [(3, 2), (2, 1)])
def test_stages_unlike_the_ranks_are_refused(monkeypatch: pytest.MonkeyPatch, stages: int, ranks: int) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(ConfigurationError, match=f"--stages {stages}, but the launcher started {ranks} ranks"):
        train(stages=stages, updates=1)


def test_one_launched_rank_is_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert train(stages=None, updates=1).summary["stages"] == 1


# -- the folder ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A run with both modes and a config."""
    out = tmp_path_factory.mktemp("mixed") / "deep" / "run"
    plan = "sync:6,async:9,sync:3"
    result = train(
        plan=plan, updates=24, held_out=HELD_OUT, evaluate_every=5, out=out, config="a = 1\n", seed=7, warmup=0.25
    )
    return out, result


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Synchronous, without held-out data or a config."""
    out = tmp_path_factory.mktemp("pure")
    return out, train(updates=4, out=out)


def test_the_folder_is_complete(mixed: tuple[Path, Result], pure: tuple[Path, Result]) -> None:
    files = {"metrics.jsonl", "decisions.jsonl", "summary.json", "curves.png"}
    assert {path.name for path in pure[0].iterdir()} == files
    assert {path.name for path in mixed[0].iterdir()} == files | {"config.toml"}
    assert (mixed[0] / "config.toml").read_text() == "a = 1\n"
    for out, _ in (mixed, pure):
        assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_summary_is_the_result(mixed: tuple[Path, Result], pure: tuple[Path, Result]) -> None:
    for out, result in (mixed, pure):
        assert json.loads((out / "summary.json").read_text()) == result.summary
        assert result.summary.keys() >= REQUIRED


def test_what_a_pure_run_does_not_have_is_null(pure: tuple[Path, Result]) -> None:
    summary = pure[1].summary
    for name in ("held_out_loss", "held_out_perplexity", "target_perplexity", "seconds_to_target", "seed"):
        assert summary[name] is None
    assert summary["tokens_per_second"]["async"] is summary["idle_share"]["async"] is None
    assert summary["tokens_per_second"]["sync"] > 0
    assert 0 <= summary["idle_share"]["sync"] <= 1
    assert (summary["mode"], summary["stages"], summary["microbatches"], summary["updates"]) == ("sync", 2, 2, 4)
    assert (summary["clock"], summary["switches"], len(summary["phases"])) == ("wall", 0, 1)


def documented() -> tuple[set[str], set[str]]:
    """The keys of both kinds of line, as the docstring of reports/metrics.py lists them."""
    text = metrics.__doc__ or ""
    update, evaluation = text.split("One line after every update:")[1].split("One line after every evaluation:")
    return tuple({*re.findall(r"^    (\w+)  +\S", part, re.MULTILINE)} for part in (update, evaluation))  # type: ignore[return-value]


def test_the_lines_are_the_documented_ones(mixed: tuple[Path, Result], pure: tuple[Path, Result]) -> None:
    update, evaluation = documented()
    assert "held_out_loss" in evaluation
    assert "loss" in update
    for out, _ in (mixed, pure):
        for line in read_metrics(out / "metrics.jsonl"):
            assert line.keys() == (evaluation if is_evaluation(line) else update)


def test_metrics_and_summary_agree(mixed: tuple[Path, Result], pure: tuple[Path, Result]) -> None:
    for out, result in (mixed, pure):
        lines, summary = read_metrics(out / "metrics.jsonl"), result.summary
        updates = [line for line in lines if not is_evaluation(line)]
        evaluations = [line for line in lines if is_evaluation(line)]
        assert [line["update"] for line in updates] == list(range(1, summary["updates"] + 1))
        assert summary["tokens"] == updates[-1]["tokens"]
        assert summary["tokens"] == sum(toys.count(toys.batches(i)[1]) for i in range(2 * summary["updates"]))
        assert summary["training_seconds"] == updates[-1]["training_seconds"]
        assert summary["training_seconds"] == pytest.approx(sum(phase["seconds"] for phase in summary["phases"]))
        assert summary["evaluation_seconds"] == pytest.approx(sum(line["evaluation_seconds"] for line in evaluations))
        assert summary["held_out_loss"] == (evaluations[-1]["held_out_loss"] if evaluations else None)
        by_mode = dict.fromkeys(("sync", "async"), 0.0)
        for phase in summary["phases"]:
            by_mode[phase["mode"]] += phase["seconds"]
        speeds = summary["tokens_per_second"]
        trained = sum(speeds[mode] * seconds for mode, seconds in by_mode.items() if speeds[mode] is not None)
        assert trained == pytest.approx(summary["tokens"])


def test_a_mixed_run_is_reported_phase_by_phase(mixed: tuple[Path, Result]) -> None:
    out, result = mixed
    phases = [(phase["mode"], phase["first_update"], phase["updates"]) for phase in result.summary["phases"]]
    assert phases == [("sync", 0, 6), ("async", 6, 9), ("sync", 15, 9)]
    assert result.summary["switches"] == 2
    assert (result.summary["mode"], result.summary["seed"]) == ("plan", 7)
    lines = read_metrics(out / "metrics.jsonl")
    assert [line["mode"] for line in lines if not is_evaluation(line)] == ["sync"] * 6 + ["async"] * 9 + ["sync"] * 9
    assert [line["update"] for line in lines if is_evaluation(line)] == [0, 5, 10, 15, 20, 24]
    decisions = read_metrics(out / "decisions.jsonl")
    assert [(line["update"], line["mode"], line["updates"]) for line in decisions] == [
        (0, "sync", 6),
        (6, "async", 9),
        (15, "sync", 3),
        (18, "sync", None),
    ]
    clock = {line["update"]: line["training_seconds"] for line in lines}
    assert [line["training_seconds"] for line in decisions] == [clock.get(line["update"], 0.0) for line in decisions]
    assert {frozenset(line) for line in decisions} == {
        frozenset(("update", "training_seconds", "mode", "updates", "evaluate", "reason", "numbers"))
    }


def test_an_adaptive_run(tmp_path: Path) -> None:
    result = train(mode="adaptive", updates=120, held_out=HELD_OUT, out=tmp_path)
    summary = result.summary
    assert summary.keys() >= REQUIRED
    assert (summary["mode"], summary["updates"]) == ("adaptive", 120)
    assert summary["phases"][0]["mode"] == "sync"
    assert summary["switches"] == len(summary["phases"]) - 1 >= 1
    assert all(value > 0 for value in summary["tokens_per_second"].values())


def test_the_target_is_noted_in_the_summary(tmp_path: Path) -> None:
    result = train(updates=50, held_out=HELD_OUT, target_perplexity=1e6, out=tmp_path)
    assert result.summary["target_perplexity"] == 1e6
    assert (result.summary["updates"], result.summary["seconds_to_target"]) == (0, 0.0)
    assert json.loads((tmp_path / "summary.json").read_text()) == result.summary


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_with_a_run_is_refused_and_left_alone(pure: tuple[Path, Result]) -> None:
    before = content(pure[0])
    with pytest.raises(ConfigurationError, match="holds another run"):
        train(updates=1, out=pure[0])
    assert content(pure[0]) == before


def test_overwrite_replaces_the_run_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    train(updates=2, out=tmp_path, config="a = 1\n")
    train(updates=3, out=tmp_path, overwrite=True)
    assert not (tmp_path / "config.toml").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert len(losses(tmp_path)) == 3
    assert json.loads((tmp_path / "summary.json").read_text())["updates"] == 3


@pytest.mark.parametrize(
    "mistake", [{"updates": 0}, {"stages": 9}, {"plan": "sync:x"}, {"mode": "adaptive"}, {"held_out": []}]
)
def test_a_mistake_does_not_cost_the_run_that_was_to_be_replaced(tmp_path: Path, mistake: dict[str, Any]) -> None:
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ConfigurationError):
        train(**{"updates": 1, **mistake}, out=tmp_path, overwrite=True)
    assert content(tmp_path) == {"summary.json": b"{}"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_is_no_folder(tmp_path: Path, overwrite: bool) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(ConfigurationError, match="is a file"):
        train(updates=1, out=path, overwrite=overwrite)
    assert path.read_text() == "mine"


def test_the_display_can_be_switched_off(capfd: pytest.CaptureFixture[str]) -> None:
    train(updates=2, held_out=HELD_OUT)
    assert capfd.readouterr() == ("", "")
    train(updates=2, held_out=HELD_OUT, progress=True)
    shown = capfd.readouterr().out
    assert "sync: 2 stages (blocks 0-1 | 2-3), 2 microbatches per update" in shown
    assert "the mode is fixed" in shown


# -- real ranks ------------------------------------------------------------------------------------------------------

PLANS = {"sync": "sync:1", "async": "async:1", "mixed": "sync:3,async:4"}


# -- emulated ------------------------------------------------------------------------------------------------------


def test_an_emulated_run_is_the_run_in_virtual_time(tmp_path: Path) -> None:
    cost = equal_stages(2, 1.0, 2.0, 0.5, link=LinkCost(0.25))
    options: dict[str, Any] = {"plan": "sync:3,async:5", "updates": 8, "held_out": HELD_OUT, "seed": 3}
    options["sync_schedule"] = "1f1b"
    real = train(**options, out=tmp_path / "real")
    emulated = train(**options, out=tmp_path / "emulated", emulate=cost, timeline=range(3))
    assert losses(tmp_path / "real") == losses(tmp_path / "emulated")
    assert_same(weights(real), weights(emulated))
    assert (real.summary["clock"], emulated.summary["clock"]) == ("wall", "virtual")
    assert read_cost(tmp_path / "emulated" / "cost.toml") == cost
    assert not (tmp_path / "real" / "cost.toml").exists()

    expected = synchronous_timeline(cost, 2, 3)
    assert emulated.timeline is not None
    # The first evaluation, of three forwards per stage and a message after each, comes before.
    start = emulated.timeline.starts[0, 0]
    np.testing.assert_allclose(emulated.timeline.ends - start, expected.ends)
    np.testing.assert_array_equal(emulated.timeline.table.indices, expected.table.indices)
    assert (tmp_path / "emulated" / "timeline.png").exists()
    # The stretch ends when stage 0 knows that stage 1 has flushed, which made its update a hop later.
    phases = {phase["mode"]: phase["seconds"] for phase in emulated.summary["phases"]}
    assert phases["sync"] == pytest.approx(expected.ends[0, -1] + 2 * 0.25)


def test_a_timeline_that_the_run_did_not_reach_is_none(tmp_path: Path) -> None:
    result = train(updates=3, timeline=range(5, 7), out=tmp_path / "run")
    assert result.timeline is None
    assert not (tmp_path / "run" / "timeline.png").exists()
    cut = train(updates=3, timeline=range(2, 7)).timeline
    assert cut is not None
    assert cut.table.kinds.tolist() == [[0, 0, 1, 1, 2], [0, 1, 0, 1, 2]]


def test_memory_is_measured_on_demand(tmp_path: Path) -> None:
    assert train(updates=1).memory is None
    result = train(updates=2, measure_memory=True, out=tmp_path / "run")
    assert result.memory is not None
    parameters = [sum(p.numel() for p in module.parameters()) for module in result.modules]
    assert [use.weight_bytes for use in result.memory] == [4 * count for count in parameters]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [stage["gradients"] for stage in summary["peak_memory"]] == [4 * count for count in parameters]


@pytest.mark.parametrize("in_flight", [1, 3])
def test_more_in_flight_is_staler(in_flight: int, tmp_path: Path) -> None:
    train(mode="async", updates=20, stages=3, in_flight=in_flight, out=tmp_path / "run")
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if not is_evaluation(line)]
    assert lines[-5]["staleness"] == [in_flight, in_flight / 2, 0]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["in_flight"] == in_flight


def test_an_emulated_run_is_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigurationError, match="all its stages in one process: start it without torchrun"):
        train(updates=1, emulate=equal_stages(2, 1, 1))


def ranks_train(world: World, out: Path) -> dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    """On one rank that has joined the others already: every plan, one after the other."""
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size))
    found = {}
    for name, plan in PLANS.items():
        result = train(stages=None, plan=plan, updates=9, held_out=HELD_OUT, evaluate_every=4, out=out / name, clip=0.5)
        assert len(result.modules) == 1
        assert dist.is_initialized(), "the process group was the caller's, and is gone"
        found[name] = (result.summary, weights(result))
    return found


TIMES = {"training_seconds", "evaluation_seconds", "tokens_per_second", "idle_share", "phases"}
TIMES_OF_LINES = {"training_seconds", "evaluation_seconds", "idle_share"}


def timeless(record: dict[str, Any], times: set[str]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in times}


def test_ranks_that_have_joined_train_as_one_process_does(tmp_path: Path) -> None:
    ranks = run_world(2, tmp_path / "world", ranks_train, tmp_path)
    for name, plan in PLANS.items():
        here = tmp_path / f"{name}-here"
        alone = train(plan=plan, updates=9, held_out=HELD_OUT, evaluate_every=4, out=here, clip=0.5)
        assert_same({**ranks[0][name][1], **ranks[1][name][1]}, weights(alone))
        first, second = (rank[name][0] for rank in ranks)
        # The time of evaluation is each rank's own; all else is known to all.
        assert timeless(first, {"evaluation_seconds"}) == timeless(second, {"evaluation_seconds"})
        assert timeless(first, TIMES) == timeless(alone.summary, TIMES)
        assert json.loads((tmp_path / name / "summary.json").read_text()) == first
        assert {path.name for path in (tmp_path / name).iterdir()} == {path.name for path in here.iterdir()}
        there_lines, here_lines = (
            [timeless(line, TIMES_OF_LINES) for line in read_metrics(out / "metrics.jsonl")]
            for out in (tmp_path / name, here)
        )
        assert there_lines == here_lines


def launch(size: int, function: Callable[[], Any]) -> list[Any]:
    """`function` on ranks that know each other by what torchrun sets: variables, and a store that outlives them."""
    context = multiprocessing.get_context("fork")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    queue = context.Queue()

    def main(rank: int) -> None:
        os.environ.update(variables, RANK=str(rank), WORLD_SIZE=str(size))
        try:
            queue.put((rank, function()))
        except BaseException:
            queue.put((rank, traceback.format_exc()))

    ranks = [context.Process(target=main, args=(rank,), daemon=True) for rank in range(size)]
    for process in ranks:
        process.start()
    try:
        answers = dict(queue.get(timeout=15) for _ in ranks)
    finally:
        for process in ranks:
            process.join(5)
            process.kill()
    return [answers[rank] for rank in range(size)]


def test_ranks_that_a_launcher_started_join_and_leave(tmp_path: Path) -> None:
    def main() -> Any:
        torch.set_num_threads(1)
        result = train(stages=None, mode="async", updates=6, held_out=HELD_OUT, out=tmp_path / "there")
        named = {name: tensor.numpy() for name, tensor in weights(result).items()}
        return named, result.summary["updates"], result.summary["held_out_loss"]

    alone = train(stages=2, mode="async", updates=6, held_out=HELD_OUT)
    answers = launch(2, main)
    assert all(isinstance(answer, tuple) for answer in answers), answers
    assert {answer[1:] for answer in answers} == {(6, alone.summary["held_out_loss"])}
    whole = {name: torch.from_numpy(array) for answer in answers for name, array in answer[0].items()}
    assert_same(whole, weights(alone))
    assert (tmp_path / "there" / "summary.json").exists()


def test_launched_ranks_can_train_more_than_once() -> None:
    """A script that compares two modes, and whose ranks do not begin the second run at the same moment."""

    def main() -> Any:
        torch.set_num_threads(1)
        modes = []
        for mode in ("sync", "async"):
            modes.append(train(stages=None, mode=mode, updates=3).summary["mode"])
            time.sleep(0.3 if os.environ["RANK"] == "0" else 0.0)
        return modes

    assert launch(2, main) == [["sync", "async"]] * 2


def test_a_process_group_without_a_launcher_is_not_overlooked(tmp_path: Path) -> None:
    """Every rank would train the whole model, all alone."""

    def main(world: World) -> Any:
        try:
            return len(train(stages=2, updates=2).modules)
        except ConfigurationError:
            return "refused"

    assert run_world(2, tmp_path, main) in ([1, 1], ["refused", "refused"])


def test_the_first_mistake_of_a_rank_is_the_one_that_is_reported(tmp_path: Path) -> None:
    """Only rank 0 writes the folder; the other one must not wait for it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text("{}")

    def main(world: World) -> Any:
        os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size))
        try:
            train(stages=None, updates=2, out=tmp_path / "run", held_out=HELD_OUT)
        except AdaPipeError as error:
            return type(error).__name__, str(error)
        return None

    outcomes = run_world(2, tmp_path / "world", main, timeout=20)
    assert outcomes[0][0] == "ConfigurationError"
    assert "holds another run" in outcomes[0][1]
    assert outcomes[1][0] == "PeerFailure"
    assert "holds another run" in outcomes[1][1]
