"""Where both planes meet."""
