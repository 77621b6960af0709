"""The step (`engine.py`), the queue (`scheduler.py`) and the target's forward (`runner.py`)."""
