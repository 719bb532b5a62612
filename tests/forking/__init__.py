"""A stand-in for `python` in tests, whose processes are forks of one that has imported torch."""
