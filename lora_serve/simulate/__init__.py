"""A fleet in virtual time: real control planes, and a model of what their steps cost."""
