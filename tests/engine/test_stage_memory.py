"""Live bytes of a stage: counted right, kept alive by nobody, and predicted for the reference GPT."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from adapipe.engine.memory import MemoryUse, MeteredStage
from adapipe.engine.pipeline import Pipeline, in_process_pipeline
from adapipe.engine.runtime import Runtime
from adapipe.engine.transport.distributed import DistributedTransport
from adapipe.errors import ConfigurationError
from adapipe.models.costs import gpt_cost
from adapipe.models.gpt import fill_gpt_weight, gpt_blocks, language_model_loss
from adapipe.models.initial import initialise_by_name
from adapipe.models.partition import partition
from adapipe.models.shape import GPTConfig, gpt_figures
from adapipe.models.stages import block_costs, stage_module
from adapipe.run import count_tokens
from adapipe.schedule.buffers import segment_buffers
from adapipe.schedule.cost import equal_stages
from adapipe.schedule.memory import StageMemory, peak_memory
from tests.engine import toys
from tests.worlds import run_world

SEQUENCE, MICROBATCH = 32, 2


def linear_stage(**options: Any) -> MeteredStage:
    """Ten inputs, ten outputs, no bias: 400 bytes of weights; a loss of the squares."""
    return MeteredStage(
        nn.Linear(10, 10, bias=False),
        0,
        1,
        loss=lambda output, targets: output.square().sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        **options,
    )


def test_one_layer_by_hand():
    stage = linear_stage()
    nothing = StageMemory(weights=400, versions=0, gradients=0, optimizer=0, activations=0)
    assert stage.use == MemoryUse(nothing, 400, 0, 0)
    inputs = torch.ones(3, 10)
    stage.forward(0, inputs, None, versioned=False)
    # The input and the output of the layer, 3 x 10 numbers each, and the loss.
    activations = 120 + 120 + 4
    assert stage.use.peak == StageMemory(400, 0, 0, 0, activations)
    stage.forward(1, inputs.clone(), None, versioned=False)
    assert stage.use.peak == StageMemory(400, 0, 0, 0, 2 * activations)
    stage.backward(0, None, 1.0)
    assert stage.use.peak == StageMemory(400, 0, 400, 0, activations)
    stage.backward(1, None, 1.0)
    stage.update(1.0, 1.0)
    # The step makes its momentum while the gradients are there.
    assert stage.use == MemoryUse(StageMemory(400, 0, 400, 400, 0), 400, 400, activations)


def test_a_step_that_moves_the_weights_holds_both_and_the_gradients():
    stage = linear_stage()
    for microbatch in (0, 1):
        stage.forward(microbatch, torch.ones(3, 10), None, versioned=True)
    stage.backward(0, None, 1.0)
    stage.update(1.0, 1.0)
    assert stage.use.peak == StageMemory(400, 400, 400, 400, 244)


def test_what_microbatches_share_counts_once():
    stage = linear_stage()
    inputs = torch.ones(3, 10)
    for microbatch in (0, 1):
        stage.forward(microbatch, inputs, None, versioned=False)
    assert stage.use.peak.activations == 120 + 2 * 124


def test_versions_in_flight_count_and_current_ones_do_not():
    stage = linear_stage()
    stage.forward(0, torch.ones(3, 10), None, versioned=True)
    assert stage.use.peak.versions == 0
    stage.forward(1, torch.ones(3, 10), None, versioned=True)
    stage.backward(0, None, 1.0)
    stage.update(1.0, 1.0)  # microbatch 1 holds the weights before
    assert stage.use.peak.versions == 400
    stage.backward(1, None, 1.0)
    assert stage.use.weight_bytes == 400


def test_frozen_weights_are_weights_and_shared_ones_count_once():
    shared = nn.Linear(10, 10, bias=False)
    frozen = nn.Linear(10, 10, bias=False).requires_grad_(False)
    stage = MeteredStage(nn.Sequential(shared, frozen, shared), 0, 1, loss=lambda o, t: o.sum(), optimizer=toys.sgd)
    assert stage.use.weight_bytes == 800
    stage.forward(0, torch.ones(1, 10), None, versioned=True)
    stage.backward(0, None, 1.0)
    assert stage.use.peak.gradients == 400


def test_the_meter_keeps_nothing_alive_and_changes_no_number():
    stage = linear_stage()
    inputs = torch.ones(3, 10)
    alive = weakref.ref(inputs)
    loss = stage.forward(0, inputs, None, versioned=True)
    stage.backward(0, None, 1.0)
    plain = nn.Linear(10, 10, bias=False)
    plain.load_state_dict(stage.module.state_dict())
    assert plain(inputs).square().sum().item() == loss.item()
    del inputs, loss
    gc.collect()
    assert alive() is None


def test_a_buffer_is_a_weight():
    norm = nn.BatchNorm1d(10)  # two weights and two buffers of 10 numbers, and the count of batches
    stage = MeteredStage(norm, 0, 1, loss=lambda output, targets: output.sum(), optimizer=toys.sgd)
    assert stage.use.weight_bytes == 4 * 40 + 8


def test_what_arrived_counts_even_if_autograd_did_not_save_it():
    stage = MeteredStage(nn.Tanh(), 1, 3, optimizer=toys.sgd)
    stage.forward(0, torch.ones(3, 10), None, versioned=False)
    assert stage.use.activation_bytes == 120 + 120  # tanh saves its output only


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_every_version_but_the_current_one_is_a_set_of_weights(
    monkeypatch: pytest.MonkeyPatch, microbatches: int, in_flight: int
):
    most = [0, 0, 0]
    stepping: list[int] = []

    class Checked(MeteredStage):
        def _note(self) -> None:
            super()._note()
            now = self._measure()
            if now.gradients and now.versions > (self.versions.live - 1) * now.weights:
                stepping.append(self.index)  # the weights have moved, and the update is not yet counted
                return
            assert now.versions == (self.versions.live - 1) * now.weights
            assert (now.activations > 0) == (self.in_flight > 0)
            most[self.index] = max(most[self.index], self.versions.live - 1)

    monkeypatch.setattr(toys, "Stage", Checked)
    toys.in_process(3, microbatches=microbatches, in_flight=in_flight).run(toys.work(12, 12))
    assert set(stepping) == {0, 1}
    assert most == [-(-2 * in_flight // microbatches), -(-in_flight // microbatches), 0]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_figures_of_the_blocks_are_what_a_microbatch_keeps(stages: int, positions: Any, precision: str):
    """To the byte, apart from what no block is charged for: rotary tables, and the loss's count of tokens."""
    config = GPTConfig(layers=2, width=32, heads=4, vocabulary=50, sequence_length=16, positions=positions)
    blocks, figures = gpt_blocks(config), gpt_figures(config, 3, 16, precision)
    value = torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(0))
    targets = value.clone()
    for index, part in enumerate(partition(block_costs(blocks), stages)):
        stage = MeteredStage(
            stage_module(blocks, part),
            index,
            stages,
            loss=language_model_loss if index == stages - 1 else None,
            optimizer=toys.sgd,
            autocast=torch.bfloat16 if precision == "bf16" else None,
        )
        value = stage.forward(0, value, targets, versioned=False)
        layers = sum(0 < block <= config.layers for block in part)
        tables = layers * 4 * config.sequence_length * config.head_width if positions == "rotary" else 0
        scalar = 4 if index == stages - 1 else 0
        expected = sum(figures[block].saved_bytes for block in part) + value.nbytes
        assert stage.use.activation_bytes == expected + tables + scalar


def gpt_pipeline(config: GPTConfig, stages: int, microbatches: int, in_flight: int, precision: str) -> Pipeline:
    blocks = gpt_blocks(config)
    parts = partition(block_costs(blocks), stages)

    def build(index: int, transport: Any, clock: Any) -> Runtime:
        module = copy.deepcopy(stage_module(blocks, parts[index]))
        initialise_by_name(module, 0, fill_gpt_weight(config))
        stage = MeteredStage(
            module,
            index,
            stages,
            loss=language_model_loss if index == stages - 1 else None,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
            autocast=torch.bfloat16 if precision == "bf16" else None,
        )

        def batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            tokens = torch.randint(256, (MICROBATCH, SEQUENCE), generator=torch.Generator().manual_seed(i))
            return tokens, tokens

        return Runtime(
            stage,
            transport,
            clock,
            batch,
            microbatches=microbatches,
            clip=1.0,
            count=count_tokens,
            rank=0,
            in_flight=in_flight,
        )

    return in_process_pipeline(stages, build, buffers=segment_buffers(stages, in_flight))


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(("positions", "precision"), [("rotary", "fp32"), ("learned", "fp32"), ("rotary", "bf16")])
def test_the_plan_predicts_the_peak_of_every_stage(stages: int, microbatches: int, positions: Any, precision: str):
    """Within 2 %; the plan promises 10 %."""
    width = 48 if positions == "rotary" else 160  # where activations weigh most, and where weights do
    config = GPTConfig(layers=4, width=width, heads=4, sequence_length=SEQUENCE, positions=positions)
    cost = gpt_cost(
        config,
        stages,
        microbatch_size=MICROBATCH,
        sequence_length=SEQUENCE,
        precision=precision,
        optimizer="adamw",
        flops_per_second=1e9,
    )
    for in_flight, synchronous in ((1, True), (1, False), (3, False)):
        # Until every microbatch in flight holds a version of its own.
        updates = 3 if synchronous else 3 + 2 * -(-in_flight * (stages - 1) // microbatches)
        pipeline = gpt_pipeline(config, stages, microbatches, in_flight, precision)
        pipeline.run(toys.work(updates, 1 if synchronous else updates))
        expected = peak_memory(cost, microbatches, schedule="1f1b" if synchronous else None, in_flight=in_flight)
        for use, predicted, stage in zip(pipeline.memory(), expected, cost.stages, strict=True):
            assert predicted.total - predicted.messages == pytest.approx(use.peak.total, rel=0.02)
            assert stage.weight_bytes == use.weight_bytes
            assert stage.optimizer_bytes == pytest.approx(use.optimizer_bytes, rel=0.001)
            assert stage.activation_bytes == pytest.approx(use.activation_bytes, rel=0.02)


def _buffers(world: Any) -> list[int]:
    """Bytes of the payloads that the transport of this rank has room for, by in_flight."""
    found = []
    for in_flight in (1, 3):
        pipeline = toys.distributed(world, microbatches=2, in_flight=in_flight)
        pipeline.run(toys.work(2, 2))
        transport = pipeline.runtimes[0].transport
        assert isinstance(transport, DistributedTransport)
        ends = [*transport._senders.values(), *transport._receivers.values()]
        found.append(sum(payload.nbytes for end in ends if end._wire for payload in end._wire.payloads))
    return found


def test_the_buffers_of_real_ranks_are_predicted(tmp_path: Any):
    """Those that hold no activation in flight count as messages; together with the others they are the rings."""
    found = run_world(3, tmp_path / "world", _buffers)
    message = toys.BATCH * toys.WIDTH * 4
    for position, in_flight in enumerate((1, 3)):
        ahead = [2 * in_flight, in_flight, 0]
        for stage, of_rank in enumerate(found):
            receives = (1 + ahead[stage] + in_flight) * (stage > 0) + (1 + in_flight) * (stage < 2)
            sends = (1 + in_flight) * ((stage > 0) + (stage < 2))
            assert of_rank[position] == (receives + sends) * message


def test_memory_that_is_not_known_is_refused():
    with pytest.raises(ConfigurationError, match="does not say how many bytes"):
        peak_memory(equal_stages(2, 1, 1), 2, schedule="1f1b")
