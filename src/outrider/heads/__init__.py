"""What trained heads share: their files, the step from their logits to guesses, and the trees that they fill.  A method itself is in
draft/."""
