"""Edits and proofs that the linear cross-entropy pages share."""
