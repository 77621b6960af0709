"""The key "online" of speculative_config."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.validate import TEXT, Kind, check_fields, optional, real

MOST = 0.5  # of the time


@dataclass(frozen=True)
class Online:
    """path: folder of the learned weights.  share: most of the engine's time that training takes.
    rate: learning rate of AdamW; None: 3e-5 · 4096 / width of the target, at most 1e-3.
    """

    path: str
    share: float = 0.1
    rate: float | None = None

    def __post_init__(self) -> None:
        kinds = {
            "path": Kind("a folder", TEXT.accepts),
            "share": real(f"a number above 0 and at most {MOST}", lambda value: 0 < value <= MOST),
            "rate": optional(real("a number above 0", lambda value: value > 0)),
        }
        check_fields(self, kinds)
