"""What is checked inside a training process: imports, marks, ranks that must agree."""
