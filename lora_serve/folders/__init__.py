"""Directories that a server writes to, which no other user may change."""
