"""The activation of MLP and LSTM speculators."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.heads.speculators import gelu


class Calls(TorchDispatchMode):
    """names: of the operations called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_gelu_is_exact_without_onednn() -> None:
    """torch's own GELU costs a millisecond a draft token on a CPU: it starts oneDNN's threads."""
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(4)) * 3
    with Calls() as calls:
        ours = gelu(x)
    assert "erf" in calls.names and "gelu" not in calls.names
    torch.testing.assert_close(ours, F.gelu(x), rtol=1e-5, atol=1e-6)
    assert gelu(x.bfloat16()).dtype == torch.bfloat16
