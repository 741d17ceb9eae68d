"""Generation by vLLM's servers: ``engine: vllm``."""

PROVIDES = {"engines": {"vllm": "extras.vllm.engine:build_engine"}}
