"""``rollmill fate``: where the rollouts of a run went, from its journal."""
