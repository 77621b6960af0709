"""Shared parts of trained heads: files, sampling of draft tokens from logits, and draft trees.

The drafting methods themselves are in draft/.
"""
