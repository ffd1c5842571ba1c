"""Where the figures in docs/ come from: speed, soak, gpu and peers, each with commands of its own.

python -m benchmarks.speed.overhead, and so on; their results lie in results/. Not installed.
"""
