"""A corpus of source code from published projects: chosen, packed, tokenized, and described."""
