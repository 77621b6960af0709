"""OpenAI's predicted output: a text that the answer will repeat in large parts becomes a source of drafts."""

from __future__ import annotations

from typing import Any

from outrider.serve.errors import ApiError
from outrider.serve.protocol import Prediction
from outrider.serve.state import Server, encoded


def predicted(server: Server, prediction: Prediction | None) -> dict[str, Any]:
    """Sampling parameters of a `prediction`: the ids of its tokens."""
    if prediction is None:
        return {}
    parts = prediction.content
    texts = [parts] if isinstance(parts, str) else [part.get("text") for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ApiError(400, "prediction.content must be a string or a list of text parts.", "prediction")
    text = "".join(texts)  # type: ignore[arg-type]
    return {"prediction": encoded(server, text, False)} if text else {}
