"""Writing pages: scaffolds, pins, drift between versions, and the laws that a page must keep."""
