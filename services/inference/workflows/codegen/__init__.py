"""Programs and generated test cases: the workflow ``codegen_verifier`` and its parts."""
