"""HTTP in front of engines that bring no server; these modules run in the peers' environments."""
