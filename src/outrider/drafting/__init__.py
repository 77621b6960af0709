"""Building blocks of drafters: the base class, trees, lookup indexes, vocabulary maps, stop rules."""
