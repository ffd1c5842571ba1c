"""HTTP itself: the app, connections, keys, bodies, errors, streams, shutdown."""
