"""Starting a recipe: validation, run folder, torchrun, supervision."""
