"""From the text of a Megatron file to the patched text: parsing, edits, fingerprints, marks."""
