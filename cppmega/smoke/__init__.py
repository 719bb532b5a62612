"""The CPU smoke run: a small GPT with MTP trains on stock and on patched code, on a frozen text."""
