"""Which adapters exist, in which version, and which are in memory."""
