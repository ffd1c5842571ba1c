"""`python -m benchmarks.soak.fleet`: replicas that share adapters' names, and every answer judged.

Operators change the same names at once on several replicas, while replicas, engines and the store
of the catalog are killed and stopped (`__main__`). Each answer must be of a version that its name
can have stood for (`history`).
"""
