"""The law over configurations: whatever stock can do, patched can do, with the same results."""
