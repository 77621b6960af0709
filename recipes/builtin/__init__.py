"""The built-in model family: task generators, corpus, trainer and evaluation."""
