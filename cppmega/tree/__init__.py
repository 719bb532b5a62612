"""The tree that holds megatron/: found, named by version, read, accepted edits."""
