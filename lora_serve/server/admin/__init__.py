"""Routes for operators: adapters, caches, health, metrics."""
