"""What can be known to be wrong before a launch: the checks, and what they may inspect."""
