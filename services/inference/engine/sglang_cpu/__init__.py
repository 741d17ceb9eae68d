"""The true SGLang server on a machine without a GPU: a launcher, a stand-in for its kernel package, a lock file.

Nothing here is imported by the services: ``launch.py`` is a script for the interpreter of another environment.
"""
