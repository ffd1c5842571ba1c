"""Others' clients against our server, each in an environment of its own outside the repository."""
