"""LRU cache of the LoRA adapters of an engine: loaded on first use, at most `max_loras` in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from threading import Lock
from typing import Any

from outrider.checkpoints.peft import PeftAdapter
from outrider.checkpoints.spec import Spec
from outrider.core.row import LoRARequest
from outrider.errors import ModelError, RequestError, about
from outrider.models.base import Model


class Adapters:
    """Registry and LRU cache of adapters, by lora_int_id.

    most: adapters in memory at once.  max_rank: largest accepted rank.
    """

    def __init__(self, decoder: Model, most: int, max_rank: int) -> None:
        self.decoder, self.most, self.max_rank = decoder, most, max_rank
        assert isinstance(decoder.spec, Spec), "a decoder that adapts has known layers"
        self.spec = decoder.spec
        self.lock = Lock()  # `take` is called by the thread that steps the engine
        # Until `drop`: keys of the prefix index contain adapter ids.
        self.known: dict[int, tuple[LoRARequest, PeftAdapter]] = {}
        self.loaded: OrderedDict[int, Any] = OrderedDict()  # id -> packed weights, least recently used first

    def check(self, wanted: LoRARequest) -> None:
        """Register an adapter.  Raises RequestError if it does not fit this model or its id is taken."""
        before, _ = self.known.get(wanted.lora_int_id, (wanted, None))
        if before.lora_path != wanted.lora_path:
            raise RequestError(
                f"lora_int_id {wanted.lora_int_id} is {before.lora_path!r} already, and now "
                f"{wanted.lora_path!r}: give every adapter an id of its own."
            )
        if wanted.lora_int_id not in self.known:
            try:
                found = PeftAdapter.open(wanted.lora_path, self.spec, self.max_rank)
            except ModelError as error:
                raise _refusal(wanted, error) from error
            self.known[wanted.lora_int_id] = wanted, found

    def drop(self, adapter: LoRARequest) -> None:
        """Forget an adapter, whose id must not be used again.

        Running rows keep its weights; waiting ones will fail.
        """
        with self.lock:
            self.known.pop(adapter.lora_int_id, None)
            self.loaded.pop(adapter.lora_int_id, None)

    def take(self, wanted: LoRARequest, busy: Set[int]) -> Any | None:
        """Load a checked adapter and return its packed weights, for `StepInput.adapt`.

        Evicts the least recently used adapter that is not in `busy`.  Returns None if all loaded ones are
        busy.  Raises RequestError if the weights cannot be read, or the adapter has been dropped.
        """
        with self.lock, about("lora_request"):
            return self._take(wanted, busy)

    def _take(self, wanted: LoRARequest, busy: Set[int]) -> Any | None:
        key = wanted.lora_int_id
        if key not in self.known:
            raise RequestError(f"LoRA adapter {wanted.lora_name!r} has been unloaded.")
        if key not in self.loaded:
            if len(self.loaded) >= self.most:
                idle = next((other for other in self.loaded if other not in busy), None)
                if idle is None:
                    return None
                del self.loaded[idle]
            try:
                self.loaded[key] = self.decoder.pack_adapter(self.known[key][1].read())
            except ModelError as error:
                raise _refusal(wanted, error) from error
        self.loaded.move_to_end(key)
        return self.loaded[key]


def _refusal(wanted: LoRARequest, error: ModelError) -> RequestError:
    return RequestError(f"LoRA adapter {wanted.lora_name!r} ({wanted.lora_path}): {error}")
