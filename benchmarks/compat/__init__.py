"""What others' tests say of the server, on a small real model: python -m benchmarks.compat.

None of their code is in the repository: it is fetched, run against our server, and its verdicts
are written down.
"""
