"""The CPU kernels measured against the limits of the machine they run on."""
