"""Output formats: parsers of reasoning, content and tool calls, and constraints on them."""
