"""Models and their checkpoints: one file for each family, behind the protocols of `base`."""
