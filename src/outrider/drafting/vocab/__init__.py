"""Drafts whose vocabulary is not the target's."""
