"""The patches of a tree: planned, written in one transaction, recorded, reverted."""
