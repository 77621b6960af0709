"""Constrained output: compiled grammars, the state of one in a row, and its mask as a logits processor."""
