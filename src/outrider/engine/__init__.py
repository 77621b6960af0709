"""Who runs and when: `engine.py` has the step, `scheduler.py` the queue, `runner.py` the target's forward."""
