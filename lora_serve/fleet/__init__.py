"""Replicas of one server: which of them answers a request, and how Ray Serve runs them."""
