"""Kernels for a GPU, in Triton; imported only where one trains, for Triton may be missing."""
