"""Transformations of a whole recipe, chosen on the command line: ``--profile NAME``."""
