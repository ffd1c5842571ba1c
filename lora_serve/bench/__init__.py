"""Measure any OpenAI-compatible server: seeded workloads, a driver, a report."""
