"""What a file is, from its config and headers."""
