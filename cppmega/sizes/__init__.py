"""Parts of a model that Megatron has no arguments for, and what its arguments mean; no torch."""
