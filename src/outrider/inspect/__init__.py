"""Description of checkpoint files, from their configs and headers."""
