"""Is a simulation right, and how far does it reach?"""
