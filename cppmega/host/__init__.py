"""This machine: processes, console, files, installed packages. Knows nothing of Megatron."""
