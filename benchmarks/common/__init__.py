"""What several benchmarks share: models to measure, the machine's limits, processes, figures."""
