"""Fit and evaluate the interference model."""
