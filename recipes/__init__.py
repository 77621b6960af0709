"""Recipes that make the models shipped with Outrider."""
