"""The halves of single pages that patched code imports, each named after its page."""
