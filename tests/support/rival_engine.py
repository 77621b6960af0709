"""An engine for benchmarks beside others, written by a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.bench import peers
from outrider.bench.peers import Peer, worker


def install(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `source` the module of the only other engine, "rival"."""
    script = folder / "worker.py"
    script.write_text(Path(str(worker.__file__)).read_text())
    (folder / "rival.py").write_text(source)
    monkeypatch.setattr(worker, "__file__", str(script))
    monkeypatch.setattr(peers, "PEERS", {"rival": Peer("rival", "json")})
