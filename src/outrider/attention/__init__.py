"""How a node sees: the plan says which keys each row of a forward may look at, the kernels look."""
