"""Kernels in C++ for CPUs (csrc/cpu): `backend` has them all."""
