"""The key "online" of speculative_config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from outrider.core.validate import TEXT, Checked, Kind, Positive, real

MOST = 0.5  # of the time
SHARE = real(f"a number above 0 and at most {MOST}", lambda value: 0 < value <= MOST)


@dataclass(frozen=True)
class Online(Checked):
    """path: folder of the learned weights.  share: most of the engine's time that training takes.
    rate: learning rate of AdamW; None: 3e-5 · 4096 / width of the target, at most 1e-3.
    """

    path: Annotated[str, Kind("a folder", TEXT.accepts)]
    share: Annotated[float, SHARE] = 0.1
    rate: Positive | None = None
