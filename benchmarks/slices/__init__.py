"""Runs that train one slice of a model, or a small one, in every way that is compared."""
