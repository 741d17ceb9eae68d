"""Generation by SGLang's servers: ``engine: sglang``."""

PROVIDES = {"engines": {"sglang": "extras.sglang.engine:build_engine"}}
