"""What adapters' names stand for: on this server alone, or on all that share a catalog.

The one place of the server through which names change and requests for them pass.
"""
