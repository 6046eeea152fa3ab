"""Kernels for a card, in Triton; imported only where one trains, for Triton may be missing."""
