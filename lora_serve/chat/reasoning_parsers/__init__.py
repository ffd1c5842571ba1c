"""Reasoning as each family of models marks it."""
