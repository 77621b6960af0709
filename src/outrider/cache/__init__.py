"""K/V cache: `pages.py` allocates pages, `pool.py` holds the tensors of one model."""
