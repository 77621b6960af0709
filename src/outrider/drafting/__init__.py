"""What drafters are built from: the base class, trees, lookup indexes, vocabulary maps, stop rules."""
