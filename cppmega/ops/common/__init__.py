"""What families of kernels share: facts about devices, launches, tiles, bits, and `main_grad`."""
