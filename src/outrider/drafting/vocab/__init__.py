"""Drafts whose vocabulary differs from the target's."""
