"""Kernels: contract/ says what they do, select.py which of them serve."""
