"""Starting a recipe: request, preflight, run folder, torchrun under supervision.

`prepare` turns a request into a validated launch, `folder` records it, `start` starts it.
"""
