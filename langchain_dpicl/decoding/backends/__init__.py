"""Models that give next-token logits: transformers in process, and llama.cpp or vLLM servers."""
