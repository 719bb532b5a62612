"""Parts of a model that Megatron has no arguments for, as a recipe states them; without torch."""
