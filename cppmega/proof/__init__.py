"""Running the proofs of pages on stock, patched and mutated trees."""
