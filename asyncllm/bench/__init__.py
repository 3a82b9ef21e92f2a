"""``asyncllm bench``: how fast a model is, offline and behind HTTP, and how that compares.

No torch here: a case is a list of prompts, and what runs it is ``AsyncLLM`` or any server that
speaks OpenAI's protocol.
"""
