"""Sandboxed execution of untrusted Python: the pool (asyncio side) and ``bare`` (the supervisor's side)."""
