"""How a guarded process ends: the judgement, its record, and the children of a run."""
