"""Adapters of the oracle files that are advantages, returns and values."""

from __future__ import annotations

from _oracle_vectors import Adapter

ADAPTERS: dict[str, Adapter] = {}
