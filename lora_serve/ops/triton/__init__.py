"""Kernels in Triton for NVIDIA cards: `backend` has them all."""
