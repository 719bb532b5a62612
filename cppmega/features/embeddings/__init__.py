"""Embeddings that are added to that of the tokens: n-grams and syntax."""
