"""The control plane alone: an executor whose KV shows every block that is stale or foreign."""
