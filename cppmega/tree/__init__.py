"""Find, name and read the tree that holds megatron/, with the edits that a team accepts in it."""
