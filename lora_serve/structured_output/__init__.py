"""Grammars: compiled, and followed token by token, in a process of their own."""
