"""Differentiate in low precision: with one loss scale, and beyond it."""
