"""Fitting a method to a model and a machine."""
