"""What replicas cost, and what the choice among them is worth."""
