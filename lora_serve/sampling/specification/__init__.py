"""Sampling in numpy, one row at a time: what all other samplers give, to the bit."""
