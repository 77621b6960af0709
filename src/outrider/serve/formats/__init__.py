"""Formats of tool calls in the texts of models: objects of JSON, tags, and calls in Python's syntax."""
