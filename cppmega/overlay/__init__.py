"""Plan, write, record and revert the patches of a tree."""
