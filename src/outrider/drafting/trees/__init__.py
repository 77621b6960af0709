"""Draft trees while they grow."""
