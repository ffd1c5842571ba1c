"""Ranks of one model: what each of them holds, and how they put their parts together."""
