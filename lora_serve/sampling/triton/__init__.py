"""Sampling by Triton kernels."""
