"""Loading of a model on several ranks."""

from __future__ import annotations

import torch

from outrider.checkpoints.hub import Checkpoint
from outrider.checkpoints.spec import LIKE_LLAMA, Spec
from outrider.checkpoints.weights import Source
from outrider.errors import ConfigError
from outrider.models.base import Model
from outrider.models.decoder import rotations
from outrider.models.placement import Precision
from outrider.parallel.group import Group
from outrider.parallel.layout import Layout
from outrider.parallel.messages import Report, Setup, pinned_device
from outrider.parallel.model import ParallelModel
from outrider.parallel.stage import ModelOptions, Stage
from outrider.parallel.start import join, placed, start, threads_of_rank

SELF_TEST = 32  # positions that the self-test computes


def load(
    checkpoint: Checkpoint,
    precision: Precision,
    device: torch.device,
    max_len: int,
    layout: Layout,
    revision: str | None,
) -> ParallelModel:
    """Start the other ranks and load the model on all of them.

    In a process that a launcher made another rank than 0, this does not return: see `start.join`.
    Raises ConfigError for a model that cannot be divided so, and what the ranks raise.
    """
    if placed():
        join()
    options = _options(checkpoint, layout, device, precision, max_len)
    own, threads = pinned_device(device, 0), threads_of_rank(layout.size, device)
    torch.set_num_threads(threads)
    group = Group(start(layout, own, threads))
    try:
        group.open(Setup.of(checkpoint, revision, options, threads))
        stage = Stage(checkpoint.tensors(), options, 0, own)
        reports = group.begin(stage, Report.of(stage, checkpoint.fingerprint))
    except BaseException:
        group.close()
        raise
    return ParallelModel(group, stage, reports, max_len)


def load_beside(
    target: Model,
    ranks: int,
    checkpoint: Checkpoint,
    precision: Precision,
    max_len: int,
    revision: str | None,
) -> ParallelModel:
    """Load a draft model on the ranks of its target, divided like it.

    ranks: those that share a layer.  Raises ConfigError if they are not the target's, or if the model cannot
    be divided so.  A rank that cannot load ends the target.
    """
    target = _several(target, ranks)
    options = _options(checkpoint, target.layout.even, target.device, precision, max_len)
    return _beside(target, Setup.of(checkpoint, revision, options, torch.get_num_threads()), max_len)


def divide(target: Model, weights: Source, options: ModelOptions) -> ParallelModel:
    """Put layers that are not a model's, such as a head's, on the ranks of the target's first stage.

    weights: read on every rank.  Raises as `load_beside`.
    """
    target = _several(target, options.layout.tensor)
    options.layout.check(options.spec, "draft_tensor_parallel_size")
    setup = Setup("", None, None, None, options, torch.get_num_threads(), weights)
    return _beside(target, setup, target.max_len)


def _beside(target: ParallelModel, setup: Setup, max_len: int) -> ParallelModel:
    """One more model on the target's ranks."""
    weights, fingerprint = setup.open()
    stage = Stage(weights, setup.options, 0, target.device)
    number, reports = target.group.add(stage, Report.of(stage, fingerprint), setup)
    return ParallelModel(target.group, stage, reports, max_len, number)


def _several(target: Model, ranks: int) -> ParallelModel:
    """A target on several ranks.  Raises ConfigError if not so many share a layer."""
    size = target.layout.tensor if isinstance(target, ParallelModel) else 1
    if not isinstance(target, ParallelModel) or size != ranks:
        raise ConfigError(
            f"draft_tensor_parallel_size must be 1, for a draft on one rank, or the target's "
            f"tensor_parallel_size, {size}: got {ranks}."
        )
    return target


def _options(
    checkpoint: Checkpoint, layout: Layout, device: torch.device, precision: Precision, max_len: int
) -> ModelOptions:
    """Options for all ranks.  Raises ConfigError for a model that cannot be divided so."""
    spec = checkpoint.spec
    if not isinstance(spec, Spec):
        raise ConfigError(
            f"tensor_parallel_size and pipeline_parallel_size are for {', '.join(LIKE_LLAMA)}; "
            f"{spec.architecture} runs in one process: leave them out."
        )
    if not spec.like_llama:
        option = "tensor_parallel_size" if layout.tensor > 1 else "pipeline_parallel_size"
        raise ConfigError(f"{option} is not supported for {spec.architecture}: leave it out.")
    layout.check(spec)
    table = rotations(checkpoint.config, max_len, SELF_TEST)
    return ModelOptions(spec, layout, device.type, precision, table)
