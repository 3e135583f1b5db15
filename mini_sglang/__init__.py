"""mini_sglang: an LLM inference and serving engine to read, change and run."""
