"""The smoke run of the README: stock and patched Megatron on two cores, and their comparison."""
