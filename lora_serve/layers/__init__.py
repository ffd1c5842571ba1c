"""The decoder's building blocks."""
