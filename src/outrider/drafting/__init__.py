"""Building blocks of drafters: the base class, trees, vocabulary maps, stop rules."""
