"""The adapter catalog: one truth for what each name stands for, on all replicas."""
