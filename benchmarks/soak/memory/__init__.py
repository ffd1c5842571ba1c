"""`python -m benchmarks.soak.memory`: rounds of equal load, and what the processes hold after each.

`load` is what a round asks; `hook` is imported by the server's processes as they start, and makes
them write what they hold (`reports`) when they get a signal.
"""
