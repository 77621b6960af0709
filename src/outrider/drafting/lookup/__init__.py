"""Text look-up: the run index, and the tree of what followed a match."""
