"""The probes: a file for each group, whose PROBES the catalog lists."""
