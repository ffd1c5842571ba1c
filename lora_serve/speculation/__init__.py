"""Guesses of the tokens that come next, for a step to verify. Touches no tensor."""
