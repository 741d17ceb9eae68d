"""A lock for ``ast.parse``: CPython 3.11 counts the depth of a tree for the whole process, so that two threads that build trees at
once raise SystemError ("AST constructor recursion depth mismatch")."""

from __future__ import annotations

import threading

PARSING = threading.Lock()
