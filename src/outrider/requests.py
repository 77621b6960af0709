"""From a prompt and its parameters to rows, and from rows to an output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.engine.engine import Engine
from outrider.engine.text import Detokenizer, shown
from outrider.errors import RequestError
from outrider.outputs import CompletionOutput, RequestOutput
from outrider.sampling.noise import mix
from outrider.sampling.params import SamplingParams
from outrider.sampling.processors import min_tokens
from outrider.types import Row

Prompt = str | Mapping[str, Any]  # "text", {"prompt": "text"} or {"prompt_token_ids": [1, 2, 3]}


@dataclass
class Request:
    """One prompt on its way: a row for each of its n samples."""

    id: str
    prompt: str | None
    ids: list[int]
    params: SamplingParams
    rows: list[Row]
    tokenizer: Any

    @property
    def finished(self) -> bool:
        return all(row.finish_reason is not None for row in self.rows)

    def output(self) -> RequestOutput:
        """The output so far."""
        outputs = [
            CompletionOutput(row.index, self._text(row), row.output, row.finish_reason, row.stop_reason, row.stats) for row in self.rows
        ]
        error = next((row.error for row in self.rows if row.error), None)
        return RequestOutput(self.id, self.prompt, self.ids, outputs, self.finished, error)

    def _text(self, row: Row) -> str:
        """Token ids that end the text are not part of it, nor is a stop string."""
        if row.text is not None:
            if row.finish_reason is None:
                return shown(row.text.text, tuple(row.params.stop or ()))
            if not isinstance(row.stop_reason, str):
                row.text.flush()
            text: str = row.text.text
            return text
        if self.tokenizer is None:
            return ""
        decoded: str = self.tokenizer.decode(row.output[:-1] if row.finish_reason == "stop" else row.output, skip_special_tokens=True)
        return decoded


@dataclass(frozen=True)
class Reader:
    """Reads prompts and parameters for one engine.  Every method raises RequestError naming what cannot be served."""

    engine: Engine
    tokenizer: Any
    seed: int  # where requests without a seed of their own get theirs from

    def request(self, id: str, prompt: Prompt, params: SamplingParams, streaming: bool) -> Request | RequestOutput:
        """A request that can be run, or the output that says why it cannot."""
        text = prompt if isinstance(prompt, str) else prompt.get("prompt") if isinstance(prompt, Mapping) else None
        try:
            ids = self._read(prompt, text)
            return Request(id, text, ids, params, self._rows(id, ids, params, streaming), self.tokenizer)
        except RequestError as error:
            return RequestOutput(id, text, [], finished=True, error=error)

    def _read(self, prompt: Prompt, text: str | None) -> list[int]:
        """The ids of a prompt, checked: there are some, they exist, and the context has room for an answer."""
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
        if text is None and ids is None:
            raise RequestError(f'a prompt must be a string, {{"prompt": …}} or {{"prompt_token_ids": […]}}, got {prompt!r}.')
        if ids is None:
            if self.tokenizer is None:
                raise RequestError("the checkpoint has no tokenizer: pass token ids, or LLM(tokenizer=…).")
            if not isinstance(text, str):
                raise RequestError(f"a text prompt must be a string, got {text!r}.")
            try:
                ids = self.tokenizer.encode(text)
            except Exception as error:  # tokenizers raise what they like, over a lone surrogate for instance
                raise RequestError(f"the tokenizer cannot read the prompt {text!r}: {error}") from error
        vocabulary, longest = self.engine.checkpoint.spec.vocabulary, self.engine.max_len
        if not isinstance(ids, (list, tuple)):
            raise RequestError(f"prompt_token_ids must be a list, got {type(ids).__name__}.")
        if len(ids) == 0:
            raise RequestError("the prompt is empty: it must have at least one token.")
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocabulary:
                raise RequestError(f"token id {token!r} does not exist: the vocabulary has ids 0 … {vocabulary - 1}.")
        if len(ids) >= longest:
            raise RequestError(f"the prompt has {len(ids)} tokens, the context holds {longest} and one must be left for the answer.")
        return list(ids)

    def _rows(self, id: str, ids: list[int], params: SamplingParams, streaming: bool) -> list[Row]:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, got {type(params).__name__}.")
        reads = bool(params.stop) or streaming
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and the checkpoint has none: use stop_token_ids.")
        eos = frozenset() if params.ignore_eos else self.engine.ending
        ending = eos | frozenset(params.stop_token_ids or ())
        if params.min_tokens and ending.issuperset(range(self.engine.checkpoint.spec.vocabulary)):
            raise RequestError("min_tokens forbids the tokens that end the text, and here that is every token there is.")
        limit = min(self.engine.max_len, len(ids) + (params.max_tokens or self.engine.max_len))
        seed = params.seed if params.seed is not None else mix(self.seed + int(id))
        rows: list[Row] = []
        for index in range(params.n):
            rows.append(
                Row(
                    id=id, index=index, tokens=list(ids), prompt=len(ids), params=params, law=params.law, seed=seed,
                    processors=min_tokens(len(ids), params.min_tokens, tuple(ending)), limit=limit, ending=ending,
                    source=rows[0] if rows else None, text=Detokenizer(self.tokenizer) if reads and self.tokenizer else None,
                )
            )  # fmt: skip
        return rows
