"""Events of the prefix cache for routers outside the engine, in vLLM's wire format."""
