"""Sandboxed execution of strangers' Python: the pool (asyncio side) and ``bare`` (the supervisor's side)."""
