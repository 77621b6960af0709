"""Loading of a model with transformers, whose sizes are checked before, and the attribute with its body."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from outrider.checkpoints.hub import Checkpoint
from outrider.checkpoints.joined_experts import open_quantized
from outrider.checkpoints.names import BODY, Prefixes
from outrider.checkpoints.weights import Weights
from outrider.errors import ModelError, first_line

log = logging.getLogger("outrider")
SLACK = 1 << 22  # weights allowed beyond one per byte of the files


def load_model(checkpoint: Checkpoint) -> Any:
    """The transformers model in the checkpoint's dtype.

    Raises ModelError for missing or misshapen tensors.
    """
    name: str = checkpoint.spec.architecture
    with quiet():
        check_sizes(checkpoint)
        load, given = _loader(checkpoint)
        try:
            model, report = load(
                config=_unquantized(checkpoint.config),
                dtype="auto",
                attn_implementation="eager",
                experts_implementation="eager",
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                key_mapping=_renaming(checkpoint),
                **given,
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
    return model.eval()


def _unquantized(config: Any) -> Any:
    """The config without its quantization, which transformers would apply itself."""
    if getattr(config, "quantization_config", None) is None:
        return config
    own = copy.deepcopy(config)
    del own.quantization_config
    return own


def _loader(checkpoint: Checkpoint) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What loads the model, and its arguments: a folder, or the tensors of a quantized checkpoint, dense."""
    if checkpoint.scheme is None:
        remote = checkpoint.trust_remote_code
        load = partial(AutoModelForCausalLM.from_pretrained, checkpoint.folder)
        return load, {"trust_remote_code": remote}
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(checkpoint.config)]
    weights, dtype = open_quantized(Weights(checkpoint.folder), checkpoint.scheme), checkpoint.stored_dtype
    tensors = dict[str, Tensor]()
    for name in weights:
        tensor = weights.raw(name)
        tensors[name] = tensor.to(dtype or torch.bfloat16) if name in weights.layer_of else tensor
    if bare := next((name for name, tensor in tensors.items() if tensor.dtype.itemsize < 2), None):
        raise ModelError(f"{bare} is {tensors[bare].dtype}, without scales that the config names.")
    size = sum(tensor.nbytes for tensor in tensors.values()) / 2**30
    log.warning("%s runs in transformers' own code: expanded to %.1f GiB", checkpoint.name, size)
    return partial(kind.from_pretrained, None), {"state_dict": tensors}


def _renaming(checkpoint: Checkpoint) -> dict[str, str] | None:
    """Regular expressions for the names of a text part; transformers knows a body without its head."""
    if not _has_files(checkpoint):
        return None
    prefixes = Prefixes.of(Weights(checkpoint.folder).where)
    return None if prefixes.body in ("", BODY) else prefixes.patterns()


def _has_files(checkpoint: Checkpoint) -> bool:
    return any(path.suffix in (".safetensors", ".bin") for path in checkpoint.folder.iterdir())


@contextmanager
def quiet() -> Iterator[None]:
    """Switch off transformers' progress bars, its load reports and its hints to install kernels.

    Missing tensors are raised instead.
    """
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


def check_sizes(checkpoint: Checkpoint) -> None:
    """Raise ModelError for a config with far more weights than the files can hold.

    transformers allocates the sizes of the config before it compares them with the files.  The model is
    counted on the meta device, which allocates nothing.
    """
    if not _has_files(checkpoint):
        return  # transformers raises an error that lists the files it looks for
    where = Weights(checkpoint.folder).where
    if checkpoint.spec.layers > len(where):
        raise ModelError(
            f"the config.json of {checkpoint.name!r} asks for {checkpoint.spec.layers:,} layers "
            f"(num_hidden_layers), and the files hold {len(where):,} tensors."
        )
    try:
        with torch.device("meta"):
            loader: Any = AutoModelForCausalLM
            model = loader.from_config(
                copy.deepcopy(_unquantized(checkpoint.config)), trust_remote_code=checkpoint.trust_remote_code
            )
    except Exception:  # loading fails in the same way and reports the reason
        return
    held = sum(path.stat().st_size for path in set(where.values()))
    held *= 1 if checkpoint.scheme is None else 2  # weights of 4 bits
    if (wanted := sum(parameter.numel() for parameter in model.parameters())) > held + SLACK:
        raise ModelError(
            f"the config.json of {checkpoint.name!r} asks for {wanted:,} weights, and the files have "
            f"{held:,} bytes: one of its sizes is wrong."
        )


def body_attribute(model: Any) -> str:
    """The attribute of the body (the model without its head).

    Llama 4 without images has a base_model_prefix that names no attribute.
    """
    prefix: str = model.base_model_prefix
    return prefix if hasattr(model, prefix) else "model"


def body_of(model: Any, architecture: str) -> Any:
    """The model without its head.  Raises ModelError if there is none."""
    body = getattr(model, body_attribute(model), None)
    if body is None:
        raise ModelError(f"{architecture} is not supported: its body and its head cannot be distinguished.")
    return body
