"""The scripts of scripts/ as modules, behind all others."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
