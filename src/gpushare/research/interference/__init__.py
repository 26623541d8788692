"""Fitting and judging the interference model."""
