"""Drive engines with random traces, and compare every answer with a lone, cold one."""
