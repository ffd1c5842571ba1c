"""One rank: executes steps."""
