"""Estimates the memory that a recipe needs on its GPUs and on its host, and names the processes that do not fit."""
