"""Routes about models, adapters and tokens."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

from fastapi import FastAPI

from outrider.requests import Reader
from outrider.serve.errors import ApiError
from outrider.serve.protocol import DetokenizeBody, LoadLoraBody, TokenizeBody, UnloadLoraBody
from outrider.serve.state import Server
from outrider.serve.wire import Json

TEMPLATE = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


def add_models(app: FastAPI, server: Server) -> None:
    """/v1/models, /tokenize, /detokenize, /v1/load_lora_adapter and /v1/unload_lora_adapter."""
    card = partial(card_of, server, int(time.time()))

    @app.get("/v1/models")
    async def models() -> Json:
        """The model and its adapters."""
        cards = [card(name) for name in server.names]
        cards += [card(name, server.names[0]) for name in server.adapters]
        return Json({"object": "list", "data": cards})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        """One model or adapter."""
        adapter = server.adapter_of(name)
        return Json(card(name, server.names[0] if adapter else None))

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Json:
        """Token ids of a text or of a rendered conversation."""
        return Json(await server.apart(partial(tokens_of, server, body)))

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Json:
        """Text of token ids."""
        vocabulary = server.llm.engine.checkpoint.spec.vocabulary
        if wrong := [token for token in body.tokens if token >= vocabulary]:
            raise ApiError(400, f"token id {wrong[0]} is none of 0 … {vocabulary - 1}.", "tokens")
        return Json({"prompt": await server.apart(lambda reader: reader.tokenizer.decode(body.tokens))})

    @app.post("/v1/load_lora_adapter")
    async def load_lora(body: LoadLoraBody) -> Json:
        """Serve an adapter from a path on the server's machine as a model.  Needs --allow-lora-loading."""
        _may_load(server)
        await asyncio.to_thread(server.add_adapter, body.lora_name, body.lora_path)
        return Json({"status": "loaded", "model": body.lora_name})

    @app.post("/v1/unload_lora_adapter")
    async def unload_lora(body: UnloadLoraBody) -> Json:
        """Remove an adapter from the models.  Needs --allow-lora-loading."""
        _may_load(server)
        server.remove_adapter(body.lora_name)
        return Json({"status": "unloaded", "model": body.lora_name})


def card_of(server: Server, created: int, name: str, parent: str | None = None) -> dict[str, Any]:
    """A model in OpenAI's shape.  parent: of an adapter."""
    engine = server.llm.engine
    base = {"id": name, "object": "model", "created": created, "owned_by": "outrider"}
    own = {"max_model_len": engine.max_len, "speculative_methods": list(engine.drafter.sources)}
    return {**base, "root": parent or server.model, "parent": parent, **own}


def _may_load(server: Server) -> None:
    server.check_ready()
    if not server.options.allow_lora_loading:
        raise ApiError(403, "loading adapters is off: start the server with --allow-lora-loading.")


def tokens_of(server: Server, body: TokenizeBody, reader: Reader) -> dict[str, Any]:
    """The answer of /tokenize.  Raises ApiError or RequestError."""
    server.adapter_of(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages.", "prompt")
    if body.messages is not None:
        prompt: Any = server.conversation(body.messages, **{name: getattr(body, name) for name in TEMPLATE})
        ids = reader.ids(prompt)
    else:
        ids = reader.encode(body.prompt or "", "prompt", body.add_special_tokens)
    made = {"tokens": ids, "count": len(ids), "max_model_len": server.llm.engine.max_len}
    names = reader.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
    return {**made, "token_strs": names}
