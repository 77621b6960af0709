"""The language model of a checkpoint that also reads images or sound: its config."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from outrider.checkpoints.names import ANY_HEAD

# Model types of text parts that transformers knows inside such a checkpoint only, and the same decoder.
# Their positions have three numbers, which are equal in a text.
SAME_DECODER = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
SHARED = ("dtype", "quantization_config")  # keys of the whole checkpoint


def has_text_part(config: Any) -> bool:
    """Whether this is a decoder with other parts than a language model."""
    return not getattr(config, "is_encoder_decoder", False) and config.get_text_config() is not config


def text_part(config: Any, settings: Mapping[str, Any], names: Collection[str]) -> Any:
    """The config of the text part.

    settings: config.json.  names: of the tensors, which say whether the head shares the embedding's weight.
    """
    text = config.get_text_config()
    if text.model_type in SAME_DECODER:
        text = _same_decoder(text)
    for key in SHARED:
        if getattr(text, key, None) is None and getattr(config, key, None) is not None:
            setattr(text, key, getattr(config, key))
    if settings.get("eos_token_id") is not None:
        text.eos_token_id = settings["eos_token_id"]
    text.tie_word_embeddings = not any(map(ANY_HEAD.fullmatch, names))
    return text


def _same_decoder(text: Any) -> Any:
    from transformers import AutoConfig

    given = {key: value for key, value in text.to_dict().items() if key != "model_type"}
    rope = given.get("rope_parameters") or {}
    given["rope_parameters"] = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    return AutoConfig.for_model(SAME_DECODER[text.model_type], **given)
