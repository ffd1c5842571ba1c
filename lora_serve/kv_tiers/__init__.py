"""KV that outlives the device cache: verified records in RAM, on disk and in Redis."""
