"""Ground: the records that travel through a step.  Imports nothing of ours but the errors."""
