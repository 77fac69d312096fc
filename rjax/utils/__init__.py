"""What scripts written for vLLM import from its package of this name."""
