"""Task directories in the form of Harbor: ``task.toml``, ``instruction.md``, ``environment``, ``tests``, ``solution``."""
