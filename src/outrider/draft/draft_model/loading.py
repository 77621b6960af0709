"""Weights of a draft model, on the devices that its options name."""

from __future__ import annotations

from dataclasses import replace

from outrider.checkpoints.hub import Checkpoint, locate
from outrider.draft.draft_model.options import DraftModelOptions
from outrider.drafting.base import Target
from outrider.drafting.options import refuse_idle
from outrider.errors import ConfigError
from outrider.models import load as models
from outrider.models.base import Model
from outrider.models.placement import Precision, pick_device, pick_dtype, place
from outrider.parallel import load as parallel

BUILTIN, BUILTIN_DRAFT = "builtin", "builtin-draft"


def default_draft(target: Checkpoint) -> str:
    """The draft model if none is named.  Raises ConfigError unless the target is a built-in one."""
    if target.tokenizer_folder != locate(BUILTIN):
        raise ConfigError("the method needs 'model': the folder or hub id of a draft model.")
    return BUILTIN_DRAFT


def completed(options: DraftModelOptions, target: Target) -> DraftModelOptions:
    """The options with a model.

    Raises ConfigError without one, if the target is not a built-in one, and for a way to sample siblings
    under a rule that reads no q: nothing is sampled then.
    """
    rules = "a verification rule that compares p with q"
    refuse_idle(options, target.needs_probs, rules, "sibling_draws")
    if options.model is None:
        return replace(options, model=default_draft(target.checkpoint))
    return options


def load_draft(
    options: DraftModelOptions, target: Model, checkpoint: Checkpoint, context: int, quantization: str | None
) -> Model:
    """The draft model in a checkpoint, for texts of at most `context` tokens.

    quantization: in place of that of the options.
    Raises ConfigError for a device or dtype that cannot be used.
    """
    chosen = options.draft_device
    device = target.device if chosen == "auto" else pick_device(chosen, "draft_device")
    dtype = pick_dtype(options.draft_dtype, checkpoint.stored_dtype, device, "draft_dtype")
    precision = Precision(dtype, quantization, target.precision.kv_cache_dtype)
    if (ranks := options.draft_tensor_parallel_size) > 1:
        return parallel.load_beside(target, ranks, checkpoint, precision, context, options.revision)
    layers = place(checkpoint.spec.layers, device, options.draft_gpu_layers, "draft_gpu_layers")
    return models.load(checkpoint, precision, device, context, layers)


def refuse_states(model: Model) -> Model:
    """The target as its own draft.  Raises ConfigError for one with recurrent layers.

    Its states are those after all known tokens, and it would draft in several forwards.
    """
    if model.state_bytes(0):
        raise ConfigError(
            f"{model.spec.architecture} has recurrent layers, and cannot be its own draft model: give "
            "another one, or a method without a draft model."
        )
    return model
