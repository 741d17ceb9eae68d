"""Environments of gymnasium in text: classes in its style (no package needed), and those of its registry, also vectorised."""
