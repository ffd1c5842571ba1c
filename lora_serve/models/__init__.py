"""From a checkpoint to a model: one file for each family, behind the protocols of `base`."""
