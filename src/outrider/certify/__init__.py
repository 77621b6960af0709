"""Proof on a user's own model that speculation keeps its promise."""
