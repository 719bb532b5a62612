"""The checks of a launch before it happens, and the context that they inspect."""
