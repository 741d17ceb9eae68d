"""The true SGLang server on a machine without a GPU: a launcher, a stand-in for its kernel package, a lock file.

The services import no module of this package: ``launch.py`` is a script for the interpreter of another environment.
"""
