"""The page for browsers: its files, and how they are served."""
