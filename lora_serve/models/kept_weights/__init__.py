"""Weights that were packed at an earlier start, kept in a directory and mapped at the next.

The one rule: what is mapped are the bytes that reading and packing the checkpoint again would give.
So a file is found only by all that shapes them (cache.py), is read only if its digest is right
(file.py), and what a model takes of it must be, step by step, what was kept (reader.py).
"""
