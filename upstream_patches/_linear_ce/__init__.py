"""What the pages of the linear cross-entropy share: edits, and proofs on tiny models."""
