"""Measure and report."""
