"""Where a decode step's time goes, part by part: what Python costs around the kernels."""
