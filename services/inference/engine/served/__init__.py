"""Generation by servers that are child processes, of SGLang or vLLM. A program's own interface is in ``extras/sglang`` or ``extras/vllm``."""
