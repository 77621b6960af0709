"""IBM's and Arctic's MLP speculator (arXiv 2404.19124): cross entropy with the text, step by step.

The publication's first stage reads texts as they are (`regenerate=False`), its second the target's own
answers: two runs, the second with `init`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outrider.checkpoints.heads import Head
from outrider.core.validate import Count, Flag
from outrider.draft.lstm_speculator import LstmSpeculator
from outrider.draft.mlp_speculator import FORMAT, Network
from outrider.errors import ConfigError
from outrider.heads.speculators import PREFIX
from outrider.train.base import Files, Method
from outrider.train.conversions import check_layout, plain
from outrider.train.options import TrainOptions


class MlpSpeculator(Method):
    @dataclass(frozen=True)
    class Options(TrainOptions):
        """n_predict: number of future tokens.  inner: width of the recurrent state; None: the target's.
        tie_weights: all steps share their weights.  scale_input: the state is normalized first.
        """

        n_predict: Count = 3
        inner: Count | None = None
        tie_weights: Flag = True
        scale_input: Flag = True

    base_rate = 1e-3
    logits, joins = False, True
    drafts: ClassVar = {}

    def build(self) -> Network:
        options, spec = self.options, self.target.decoder.spec
        inner, self.most = options.inner or spec.hidden, options.n_predict
        return Network(
            spec.hidden, inner, spec.vocabulary, options.n_predict, options.tie_weights, options.scale_input
        )

    @classmethod
    def convert(cls, head: Head, layout: str) -> Files:
        """ArcticInference also needs the architecture of the target in the config: `base_model_archs`."""
        check_layout(layout, ("reference", "vllm", "arctic"))
        names = FORMAT if FORMAT.layout_of(head) else LstmSpeculator.FORMAT
        ours, config = names.translate(head), plain(head.config)
        if layout == "vllm" and "method" in config:
            raise ConfigError(
                f"the layout 'vllm' cannot hold the method {config['method']!r}: choose 'arctic'."
            )
        if layout == "arctic" and "method" not in config:  # Arctic's own methods keep their architecture
            config["architectures"] = ["ArcticMLPSpeculatorPreTrainedModel"]
        bare = {stored.removeprefix(PREFIX): head.raw(stored) for stored in {*ours.stored.values()}}
        prefix = PREFIX if layout == "vllm" else ""
        return config, {f"{prefix}{name}": tensor for name, tensor in bare.items()}
