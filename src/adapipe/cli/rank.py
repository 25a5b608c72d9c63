"""Being a rank: one stage of a launched pipeline, or all stages of one that was not launched."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from adapipe.cli.checked import Checked, local_device
from adapipe.cli.interrupt import end_with_launcher
from adapipe.models.gpt import fill_gpt_weight, language_model_loss
from adapipe.models.initial import initialise_by_name
from adapipe.run import Result, train


def be_a_rank(device: str) -> None:
    """Set this process up: one thread, and an end with the command that started it."""
    if local_device(device).type == "cpu":
        torch.set_num_threads(1)
    end_with_launcher()


def train_checked(checked: Checked, **more: Any) -> Result:
    """`adapipe.train` with the reference model and what the configuration says."""
    config, options = checked.config, checked.options

    def materialise(module: nn.Module) -> None:
        module.to_empty(device="cpu")
        initialise_by_name(module, config.seed, fill_gpt_weight(checked.model))

    return train(
        checked.blocks,
        loss=language_model_loss,
        batches=checked.sampler,
        optimizer=checked.optimizer,
        mode=options.mode,
        plan=options.plan,
        stages=config.stages,
        microbatches=options.microbatches,
        updates=options.updates,
        seconds=options.seconds,
        warmup=options.warmup,
        decay=options.decay,
        clip=options.clip,
        held_out=checked.held_out,
        evaluate_every=options.evaluate_every,
        target_perplexity=options.target_perplexity,
        materialise=materialise,
        precision=options.precision,
        device=local_device(config.device),
        in_flight=options.in_flight,
        sync_schedule=options.sync_schedule,
        emulate=checked.emulate,
        seed=config.seed,
        **more,
    )
