"""Adaptive controllers for one target, with costs and acceptance that are kept between starts."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from outrider.checkpoints.hub import Checkpoint, locate
from outrider.config import EngineOptions, SpeculativeOptions
from outrider.control.auto import AutoController
from outrider.control.cost import ForwardCost
from outrider.control.evidence import Evidence
from outrider.control.fixed import FixedController
from outrider.control.module import module_for
from outrider.drafting.base import Drafter
from outrider.engine.calibrate import forward_cost
from outrider.engine.stored import StoredJson
from outrider.models.base import Model


@dataclass
class AdaptiveControllers:
    """Maker of adaptive controllers for one target.

    costs: of its forward, measured for the first controllers
    """

    decoder: Model
    checkpoint: Checkpoint
    options: EngineOptions
    device: torch.device
    max_len: int
    costs: ForwardCost | None = None

    def make(
        self, drafter: Drafter, limits: FixedController, speculation: SpeculativeOptions
    ) -> list[AutoController]:
        """One controller for each step in flight, all with the same evidence.

        Raises ConfigError for a control module that cannot be used.
        """
        arms = drafter.arms(limits.max_depth)
        own = self.checkpoint.folder == locate("builtin")
        module = module_for(speculation.control_module, [arm.name for arm in arms], own)
        if self.costs is None:
            self.costs = forward_cost(self.decoder, self.max_len, *self._numbers())
        stored = StoredJson("drafting", *self._about(speculation))
        evidence = Evidence(arms, copy.deepcopy(self.costs), stored, module)
        return [AutoController(limits, evidence) for _ in range(self.decoder.stages)]

    def _about(self, speculation: SpeculativeOptions) -> tuple[Any, ...]:
        """What acceptance and costs of drafters depend on."""
        options, rule = self.options, speculation.rule
        return (
            str(self.checkpoint.folder), self.checkpoint.spec, options.revision, *self._numbers(),
            self.decoder.backend.name, self.device.type, options.layout, options.gpu_layers,
            speculation.method, speculation.options, speculation.control, type(rule), rule.options,
        )  # fmt: skip

    def _numbers(self) -> tuple[Any, ...]:
        """What decides how numbers are stored and computed."""
        options = self.options
        return (
            self.checkpoint.stored_dtype, options.dtype, options.activations, options.quantization,
            options.kv_cache_dtype,
        )  # fmt: skip
