"""vLLM's servers: command, client, build. The engine over them is ``served``; ``vllm_server`` runs beside vLLM."""
