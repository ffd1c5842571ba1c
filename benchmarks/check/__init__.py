"""`lora-serve check` against other servers, installed as benchmarks/peers installs them."""
