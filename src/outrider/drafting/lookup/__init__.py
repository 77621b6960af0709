"""Indexes of text that was seen, and how far a match is trusted."""
