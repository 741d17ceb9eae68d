"""Scripts for the interpreter of vLLM's environment: the launcher, the check of vLLM's interface, the key, the transfer.

The services import no module of this package but ``interface``, which imports vLLM only when it is called.
"""
