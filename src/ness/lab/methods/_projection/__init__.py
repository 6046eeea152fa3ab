"""Gradient projection: rows of layer inputs, bases, scales."""
