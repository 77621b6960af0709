"""Anthropic's Messages API, as a translation of /v1/chat/completions."""

from __future__ import annotations
