"""The loop that trains a small GPT on CPU, on stock and on patched code."""
