"""Which blocks hold which tokens."""
