"""Programs of a clone that are not part of the package."""
