"""``asyncllm bench``: how fast a model is, offline and behind HTTP.

A case is a list of prompts; it is run by ``AsyncLLM``, or any server with OpenAI's API.
"""
