"""Pages and recipes: loaded by path, and watched while their code runs."""
