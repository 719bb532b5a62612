"""Load pages and recipes by path, and supervise their code while it runs."""
