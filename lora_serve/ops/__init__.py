"""Kernels: contract.py says what they do, select.py which of them serve."""
