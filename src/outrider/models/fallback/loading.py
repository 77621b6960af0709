"""Loading of a model with transformers, and the name of the attribute that holds its body."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from outrider.checkpoints.hub import Checkpoint
from outrider.errors import ModelError, first_line
from outrider.models.fallback.sizes import check_sizes


def load_model(checkpoint: Checkpoint) -> Any:
    """The transformers model in the checkpoint's dtype.

    Raises ModelError for missing or misshapen tensors.
    """
    name: str = checkpoint.spec.architecture
    loader: Any = AutoModelForCausalLM
    with _quiet():
        check_sizes(checkpoint)
        try:
            model, report = loader.from_pretrained(
                checkpoint.folder,
                config=checkpoint.config,
                dtype="auto",
                attn_implementation="eager",
                experts_implementation="eager",
                trust_remote_code=checkpoint.trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        except Exception as error:
            raise ModelError(
                f"transformers cannot load {checkpoint.name!r} ({name}): {first_line(error)}"
            ) from error
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"the checkpoint lacks {len(missing)} tensors of {name}: {', '.join(missing[:8])}.")
    if mismatched := sorted(report["mismatched_keys"]):
        tensor, stored, expected = mismatched[0]
        raise ModelError(f"{tensor} has shape {tuple(stored)}, the config asks for {tuple(expected)}.")
    if getattr(model, "_is_stateful", False):
        raise ModelError(f"{name} keeps a recurrent state, which cannot be verified as a tree.")
    return model.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """Switch off transformers' progress bars and load reports; missing tensors are raised instead."""
    log: Any = transformers_logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def body_attribute(model: Any) -> str:
    """The attribute of the body (the model without its head).

    Llama 4 without images has a base_model_prefix that names no attribute.
    """
    prefix: str = model.base_model_prefix
    return prefix if hasattr(model, prefix) else "model"


def body_of(model: Any, architecture: str) -> Any:
    body = getattr(model, body_attribute(model), None)
    if body is None:
        raise ModelError(f"{architecture} is not supported: its body cannot be told from its head.")
    return body
