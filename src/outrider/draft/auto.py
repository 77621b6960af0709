"""Adaptive speculation, the default: several drafters, of which the controller uses those that pay.

Without drafters `suffix` is used, and the draft `model` or head, if one is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from outrider.core.validate import Text
from outrider.draft.suffix import Suffix
from outrider.draft.union import Factory, Union, parse
from outrider.drafting.base import Drafter, Target
from outrider.errors import ConfigError

DEEPEST = 8  # tokens of a draft model's draft, of which the controller takes what pays


class Auto(Union):
    adaptive = True
    demo: ClassVar = {"auto": {"model": "builtin-draft"}}

    @dataclass(frozen=True)
    class Options(Union.Options):
        """drafters, nodes: as in `union`; without drafters `suffix` is used, and the method of `model`.
        model: a draft model or head: folder, .gguf file or hub id.
        """

        model: Text | None = None
        revision: Text | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.drafters and self.model is not None:
                raise ConfigError("give either 'drafters' or a 'model': a model is a drafter, too.")

    @classmethod
    def create(cls, options: Options, target: Target) -> Drafter:
        if options.drafters:
            return cls(options, target)
        factories: list[Factory] = [partial(Suffix, Suffix.Options())]
        if options.model is not None:
            method, own, _ = parse({"model": options.model, "revision": options.revision})
            factories.append(partial(method.create, own))
        elif options.nodes is None:
            return factories[0](target)  # a mix of one costs host time
        mix = cls(options, target, factories)
        own = zip(mix.drafters, mix.depths)
        mix.depths = [max(depth, DEEPEST) if drafter.computes_prompts else depth for drafter, depth in own]
        mix.depth = max(mix.depths)
        return mix
