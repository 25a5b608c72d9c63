"""The cost model: figures that cannot be are refused by name, and a file is read as it was written."""

from __future__ import annotations

import math
import statistics
from itertools import islice
from pathlib import Path

import pytest

from adapipe.errors import ConfigurationError
from adapipe.schedule.actions import Kind
from adapipe.schedule.cost import CostModel, LinkCost, StageCost, cost_toml, equal_stages, gather_times, read_cost

STAGE = StageCost(0.01, 0.02, 0.003, weight_bytes=400, optimizer_bytes=800, activation_bytes=5000)
COST = CostModel(
    (STAGE, StageCost(0.01, 0.03, backward_input=0.01, backward_weight=0.02, slow=1.5)),
    (LinkCost(0.001, 1e9),),
    message_bytes=1 << 20,
    tokens=512,
    jitter=0.1,
    seed=7,
    source='a "quoted" source\nwith a line',
)
HEAD = "format = 1\n"
TWO = HEAD + "[[stage]]\nforward = 1\nbackward = 2\n[[stage]]\nforward = 1\nbackward = 2\n[[link]]\n"


def test_a_file_is_read_as_it_was_written(tmp_path: Path):
    for cost in (COST, equal_stages(3, 0.5, 1.0), equal_stages(1, 1e-9, 1e9)):
        (tmp_path / "cost.toml").write_text(cost_toml(cost))
        assert read_cost(tmp_path / "cost.toml") == cost


def test_a_file_typed_by_hand(tmp_path: Path):
    (tmp_path / "cost.toml").write_text(TWO)
    cost = read_cost(tmp_path / "cost.toml")
    assert cost.stages == (StageCost(1, 2),) * 2
    assert cost.links == (LinkCost(0, math.inf),)
    assert (cost.message_bytes, cost.tokens, cost.jitter) == (0, None, 0)
    assert cost.source == str(tmp_path / "cost.toml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "format = None: this version reads format = 1"),
        ("format = 2", "format = 2: this version reads format = 1"),
        ("format 1", "is not TOML"),
        (HEAD, "there is no stage"),
        (HEAD + "stage = 3", r"stage must be a list of tables: write \[\[stage\]\]"),
        (HEAD + "stage = [3]", "stage 0 is not a table"),
        (HEAD + "[[stage]]\nforward = 1", "stage 0: backward is missing"),
        (TWO + "[[stage]]\nforward = 1\nbackward = 2", "3 stages and 1 links: give 2, one between"),
        (TWO + "[[link]]", "2 stages and 2 links: give 1"),
        (TWO + "speed = 1", "link 0: there is no entry speed; there are latency, bandwidth"),
        (TWO + "latency = '1'", "link 0: latency = '1' must be a number"),
        (TWO + "latency = true", "link 0: latency = True must be a number"),
        (TWO + "latency = -1", "link 0: latency = -1: give a number that is not negative"),
        (TWO + "latency = nan", "link 0: latency = nan"),
        (TWO + "latency = inf", "link 0: latency = inf"),
        (TWO + "bandwidth = 0", "link 0: bandwidth = 0: give a number above 0"),
        (HEAD + "jitters = 1", "the top level: there is no entry jitters; there are message_bytes, tokens, jitter"),
        (HEAD + "tokens = 1.5", "the top level: tokens = 1.5 must be a whole number"),
        (HEAD + "source = 1", "the top level: source = 1 must be a text"),
        ("seed = -1\n" + TWO, "seed = -1"),
        ("jitter = -0.1\n" + TWO, "jitter = -0.1"),
        ("tokens = 0\n" + TWO, "tokens = 0: a microbatch has at least 1"),
        (
            TWO.replace("= 1", "= 0").replace("= 2", "= 0").replace("t = 0", "t = 1"),
            "forward and backward are 0 on every",
        ),
        (TWO.replace("forward = 1", "forward = -1", 1), "stage 0: forward = -1: give a number that is not negative"),
        (TWO.replace("backward = 2", "backward = -2", 1), "stage 0: backward = -2"),
        (TWO.replace("backward = 2", "backward = inf", 1), "stage 0: backward = inf"),
        (TWO.replace("backward = 2", "backward = 2\nslow = 0", 1), "stage 0: slow = 0"),
        (TWO.replace("backward = 2", "backward = 2\nupdate = -1", 1), "stage 0: update = -1"),
        (TWO.replace("backward = 2", "backward = 2\nbackward_input = -1", 1), "stage 0: backward_input = -1"),
        (TWO.replace("backward = 2", "backward = 2\nweight_bytes = 8", 1), "stage 0: weight_bytes given alone"),
        (TWO.replace("backward = 2", "backward = 2\nweight_bytes = 8.5", 1), "weight_bytes = 8.5 must be a whole"),
    ],
)
def test_nonsense_is_refused_with_the_entry(text: str, says: str, tmp_path: Path):
    path = tmp_path / "cost.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=says) as caught:
        read_cost(path)
    assert str(caught.value).startswith(f"cost file {path}")
    assert "\n" not in str(caught.value).removeprefix(f"cost file {path} is not TOML")


def test_a_file_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_cost(tmp_path / "none.toml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="is not TOML"):
        read_cost(tmp_path / "binary")


def test_equal_stages_need_a_stage():
    with pytest.raises(ConfigurationError, match="a pipeline of 0 stages does not exist"):
        equal_stages(0, 1, 1)


def test_seconds_include_slowness():
    assert [COST.stages[1].seconds(kind) for kind in list(Kind)[:3]] == [0.015, 0.045, 0]


def test_jitter_has_mean_one_and_repeats():
    cost = equal_stages(2, 1, 1, jitter=0.5, seed=3)
    draws = list(islice(cost.factors(0), 20_000))
    assert draws == list(islice(cost.factors(0), 20_000))
    assert draws[:5] != list(islice(cost.factors(1), 5))
    assert draws[:5] != list(islice(equal_stages(2, 1, 1, jitter=0.5, seed=4).factors(0), 5))
    assert statistics.mean(draws) == pytest.approx(1, abs=0.02)
    assert statistics.stdev(map(math.log, draws)) == pytest.approx(0.5, abs=0.02)
    assert list(islice(equal_stages(2, 1, 1).factors(0), 3)) == [1, 1, 1]


def test_gather_times():
    assert gather_times([5.0], []) == [5]
    assert gather_times([1.0, 2.0, 3.0], [0.0, 0.0]) == [3, 3, 3]
    assert gather_times([9.0, 2.0, 3.0], [1.0, 0.5]) == [9, 10, 10.5]
    assert gather_times([0.0, 0.0, 8.0], [1.0, 0.5]) == [9.5, 10.5, 11]
