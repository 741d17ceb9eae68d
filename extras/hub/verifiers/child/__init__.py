"""The program that another interpreter runs: it imports the standard library and ``verifiers``, nothing of Rollmill."""
