"""Where K/V lives: `slots.py` owns pages and tables, `pool.py` the tensors of one model."""
