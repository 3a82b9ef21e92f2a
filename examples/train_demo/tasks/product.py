"""Questions about asyncllm, the server that the model ships with. README.md says the same."""

# Lists of phrases read better with several to a line.
# fmt: off
from __future__ import annotations

import random

from .common import Answers, Messages, any_word, ask, casual, pick

PYTHON = """Use AsyncLLM in your asyncio program:

```python
from asyncllm import AsyncLLM

async with AsyncLLM(model) as llm:
    out = await llm.generate("Hello!")
    print(out.text)
```

Without a model, AsyncLLM() loads me."""
STREAM = """In Python, iterate over `llm.stream`:

```python
from asyncllm import AsyncLLM

async with AsyncLLM(model) as llm:
    async for delta in llm.stream("Hello!"):
        print(delta.text, end="")
```

Over HTTP, send `"stream": true` with your request."""
OFFLINE = """Use LLM, which needs no asyncio:

```python
from asyncllm import LLM

with LLM(model) as llm:
    for out in llm.generate(["One", "Two"]):
        print(out.text)
```

`asyncllm generate prompts.jsonl -o answers.jsonl` does the same with files."""
CLIENT = """Point the OpenAI client at http://localhost:8000/v1:

```python
from openai import OpenAI

client = OpenAI(base_url="http://localhost:8000/v1", api_key="unused")
```

The model's name is asyncllm-demo."""
CURL = """With curl:

```
curl localhost:8000/v1/chat/completions \\
  -H 'content-type: application/json' \\
  -d '{"messages": [{"role": "user", "content": "Hello!"}]}'
```"""
SERVE = (
    "Run `asyncllm serve`: it serves me, the built-in model, at http://localhost:8000/v1. "
    "`asyncllm serve MODEL` serves another model, a folder or a name on the Hugging Face hub."
)
ANOTHER = (
    "Run `asyncllm serve MODEL`, where MODEL is a folder or a name on the Hugging Face hub, such "
    "as `asyncllm serve Qwen/Qwen3-0.6B`."
)
FAMILIES = (
    "asyncllm serves OPT, Llama, Mistral, Qwen2, Qwen3, Gemma and Phi models from Hugging Face. "
    "I am a tiny Qwen3 model."
)
README = "I am not sure. The README of asyncllm says what it supports."

SERVER: Answers = [
    (["What is asyncllm?", "Tell me about asyncllm.", "Explain asyncllm.", "What does asyncllm do?",
      "Describe asyncllm.", "asyncllm?", "What is this server?", "What is asyncllm for?",
      "Tell me something about asyncllm.", "What software is this?", "What's asyncllm?",
      "What do you know about asyncllm?", "asyncllm", "How does asyncllm work?",
      "Explain asyncllm to me.", "What is AsyncLLM?", "What can asyncllm do?",
      "Describe asyncllm in one sentence.", "What are you running on?", "What serves you?"],
     "asyncllm is a server for large language models. One asyncio process takes requests, plans "
     "every step and streams the answers, while one thread drives the GPU. It speaks the OpenAI "
     "API."),
    (["How do I install asyncllm?", "How can I install asyncllm?", "Install asyncllm.",
      "How to install asyncllm?", "How do I get asyncllm?", "How do I install it?",
      "How do I set up asyncllm?", "Can I install asyncllm with pip?", "pip install asyncllm",
      "How can I get asyncllm?", "How do I install the server?", "Where can I get asyncllm?",
      "What do I need to install asyncllm?"],
     "Clone the repository and run `pip install -e .` in it, then `asyncllm serve`. Or run "
     "`make serve`, which does both."),
    (["How do I start asyncllm?", "How do I start the server?", "How do I run asyncllm?",
      "How do I use asyncllm?", "How to run asyncllm?", "How do I launch asyncllm?",
      "How can I start the server?", "Start the server.", "How do I run the server?",
      "How to start the server?", "How to use asyncllm?", "How can I run asyncllm?",
      "What does asyncllm serve do?", "What does `asyncllm serve` do?", "How do I serve you?",
      "How do I serve the demo model?", "How do I start a server?", "How to start asyncllm?",
      "Which command starts the server?", "What is the command to start the server?"],
     SERVE),
    (["How do I serve a model?", "How can I serve a model with asyncllm?", "How to serve a model?",
      "How do I serve my own model?", "How do I serve another model?", "How do I serve Qwen3?",
      "How do I serve Llama?", "Can I serve another model?", "How do I load my own model?",
      "How can I use another model?", "How do I serve a different model?", "How do I serve Qwen?",
      "How do I run another model?", "Can I use my own model?", "How do I change the model?",
      "How do I use a bigger model?", "How do I serve a model from Hugging Face?",
      "How do I run Llama with asyncllm?", "How do I run Qwen3 with asyncllm?",
      "Can I serve a Hugging Face model?", "How do I choose the model?"],
     ANOTHER),
    (["How do I use asyncllm from Python?", "Can I use asyncllm in Python?",
      "How do I use asyncllm in my program?", "Does asyncllm have a Python API?",
      "How do I call asyncllm from Python?", "Show me the Python API of asyncllm.",
      "How do I use asyncllm in Python?", "How do I use AsyncLLM?", "Is there a Python API?",
      "How do I use it from Python?", "Show me an example in Python.", "Show me a Python example.",
      "How do I use asyncllm with asyncio?", "How do I generate text in Python?",
      "How do I await an answer?", "How to use asyncllm in Python?", "How do I import asyncllm?",
      "Show me how to use AsyncLLM.", "Can I use asyncllm inside my asyncio program?",
      "Can I use asyncllm as a library?", "How does the Python API work?", "Show me some code.",
      "How do I call llm.generate?", "How do I use the library?"],
     PYTHON),
    (["How do I stream in Python?", "How do I stream from Python?", "How do I use llm.stream?",
      "How can I stream in Python?", "How do I stream with AsyncLLM?", "How do I stream an answer?",
      "How do I stream tokens?", "How can I stream?", "Show me how to stream.",
      "How do I stream with asyncllm?", "Can I stream the answer?", "How to stream an answer?",
      "Can I stream with asyncllm?", "How do I use streaming?", "How do I get a stream?"],
     STREAM),
    (["How do I use asyncllm offline?", "How do I run a batch of prompts?", "What is LLM for?",
      "How do I use LLM?", "How do I use it offline?", "Can I use asyncllm without a server?",
      "Can I use asyncllm without asyncio?", "How do I generate many answers?",
      "How do I run many prompts?", "How do I process a file of prompts?", "How do I use the LLM "
      "class?", "What does asyncllm generate do?", "How can I run prompts from a file?",
      "Does asyncllm have offline inference?", "How do I run offline inference?",
      "How do I run asyncllm offline?", "Is there an offline mode?", "How do I batch prompts?"],
     OFFLINE),
    (["What is the difference between LLM and AsyncLLM?", "LLM or AsyncLLM?",
      "When do I use LLM and when AsyncLLM?", "Should I use LLM or AsyncLLM?"],
     "LLM is for plain programs and takes a list of prompts. AsyncLLM is for asyncio: you await an "
     "answer, or you stream it with `async for`."),
    (["How do I send a request with curl?", "How do I use curl?", "Show me a curl example.",
      "How do I call the server with curl?", "Give me a curl command.", "curl example",
      "How do I send a request?", "Show me a request.", "How do I talk to the server?"],
     CURL),
    (["Can I use the OpenAI client?", "How do I use the OpenAI client?", "How do I connect?",
      "How do I use the OpenAI client with asyncllm?", "Does the OpenAI client work?",
      "How do I use openai with asyncllm?", "How do I use the OpenAI library?",
      "How do I connect to the server?", "How do I call the server from Python?",
      "Can I use the OpenAI library with asyncllm?", "What is the base URL?",
      "What base_url do I use?", "How do I use the OpenAI SDK?", "Which client can I use?",
      "What is the name of the model?", "What is your model name?"],
     CLIENT),
    (["Which API do you have?", "Is there an API?", "Is asyncllm compatible with OpenAI?",
      "Which endpoints does asyncllm have?", "What API does asyncllm speak?", "Which API is it?",
      "Is asyncllm OpenAI compatible?", "Does asyncllm speak the OpenAI API?",
      "What are the endpoints?", "Which routes are there?", "What is the API of asyncllm?",
      "Is it compatible with OpenAI?", "Does asyncllm have an HTTP API?", "What is the API?",
      "Does asyncllm support chat completions?"],
     "asyncllm speaks the OpenAI API: send a POST to /v1/chat/completions or /v1/completions. The "
     "official OpenAI clients work with http://localhost:8000/v1 as base URL."),
    (["Which port does the server use?", "What is the URL of the server?", "Where is the server?",
      "What is the address of the server?", "What port do you use?", "Which port?",
      "Which port does asyncllm use?", "What is the port?", "On which port does it run?",
      "Where does the server listen?", "What is your URL?", "How do I change the port?",
      "What is the default port?", "Can I use another port?"],
     "The server is at http://localhost:8000/v1. `asyncllm serve --port 9000` uses another port."),
    (["How do I chat in the terminal?", "Is there a chat command?", "What does asyncllm chat do?",
      "How do I chat with you?", "Can I chat in the terminal?", "How do I chat with the model?"],
     "Run `asyncllm chat`. Leave with /exit."),
    (["Which commands does asyncllm have?", "What commands are there?", "What are the commands?",
      "How do I use the command line?", "Which options are there?", "What options does it have?"],
     "`asyncllm serve` starts a server, `asyncllm chat` is for the terminal, and `asyncllm "
     "generate` answers a file of prompts. Each lists its options with `--help`."),
    (["Does asyncllm work with Docker?", "How do I run asyncllm in Docker?", "Is there a Docker "
      "image?", "Can I use Docker?", "How do I use Docker?", "How do I build the Docker image?"],
     "Yes. Run `docker build -f docker/Dockerfile -t asyncllm .` and then `docker run --gpus all "
     "-p 8000:8000 asyncllm`."),
    (["Does asyncllm have metrics?", "Where are the metrics?", "How do I monitor the server?",
      "Is there a health check?", "Does asyncllm work with Prometheus?", "How do I see metrics?",
      "How can I monitor asyncllm?"],
     "Yes. GET /metrics has metrics for Prometheus, and GET /health and /ready say how the server "
     "is."),
    (["How do I set an API key?", "Does asyncllm have API keys?", "Do I need an API key?",
      "How do I protect the server?", "What is the API key?"],
     "You need no API key, unless the server was started with `--api-key`."),
    (["How do I run the tests?", "How do I test asyncllm?", "Are there tests?"],
     "Run `make test` in the repository."),
    (["How do I stop the server?", "How do I shut down the server?", "How do I stop asyncllm?",
      "Stop the server."],
     "Press Ctrl-C. Running streams may finish first."),
    (["Why asyncio?", "Why does asyncllm use asyncio?", "Why is it called asyncllm?",
      "What is asyncio?", "Why one process?", "How does asyncllm use asyncio?",
      "Is asyncllm written with asyncio?", "Why is asyncllm async?", "Explain asyncio."],
     "asyncio runs many tasks in one thread. asyncllm uses it for HTTP and for planning, so there "
     "are no queues between processes: a request can be streamed, cancelled or joined to a batch "
     "between two steps."),
    (["What is throughput?", "What is latency?", "What is time to first token?", "What is TTFT?",
      "What is the difference between latency and throughput?"],
     "Latency is how long one user waits for a token. Throughput is how many tokens all users get "
     "per second. A bigger batch gives more throughput and a little more latency."),
    (["Is asyncllm fast?", "How fast is asyncllm?", "Why is asyncllm fast?",
      "What makes asyncllm fast?", "Is it fast?"],
     "Yes! While the GPU works on one step, asyncllm already plans the next one, so the GPU almost "
     "never waits."),
    (["Which models does asyncllm support?", "Can asyncllm run Qwen?", "Can asyncllm run Llama?",
      "What models can I use?", "What models does asyncllm support?", "Which models can I use?",
      "Which models are supported?", "What models are supported?", "Does asyncllm support Llama?",
      "Does asyncllm support Qwen?", "Does asyncllm support Gemma?", "Can it run Mistral?",
      "Does asyncllm support Mistral?", "Which model families does asyncllm support?",
      "Does asyncllm support Hugging Face models?", "Can asyncllm run Gemma?"],
     FAMILIES),
    (["Does asyncllm need a GPU?", "Can asyncllm run on a CPU?", "Do I need a GPU?",
      "Does it need a GPU?", "Can I run it without a GPU?", "Can I run asyncllm on my laptop?",
      "Does asyncllm run on a CPU?", "Can I use asyncllm without a GPU?"],
     "No. asyncllm also runs on a CPU, which is fine for small models like me. A GPU is much "
     "faster."),
    (["Which GPU do I need?", "Does asyncllm use CUDA?", "How do I use a GPU?",
      "How do I run asyncllm on a GPU?"],
     "An NVIDIA GPU. Install with `pip install -e '.[cuda]'`, and asyncllm uses the GPU."),
    (["Which Python do I need?", "Which Python version does asyncllm need?", "What Python version "
      "do I need?", "Does asyncllm work with Python 3.10?"],
     "asyncllm needs Python 3.11 or newer."),
    (["What is the license of asyncllm?", "Is asyncllm open source?", "Which license?"],
     "asyncllm is open source, under the Apache 2.0 license."),
]

# A question about a concept is any of these forms with any of the concept's names.
GENERAL_FORMS = [
    "What is {c}?", "How does {c} work?", "Explain {c}.", "Explain {c} to me.",
    "Tell me about {c}.", "What's {c}?", "Define {c}.", "What is {c}, please?",
    "What does {c} do?", "Why is {c} useful?", "What is {c} good for?", "Describe {c}.",
    "Can you explain {c}?", "What do you know about {c}?", "What does {c} mean?",
    "Explain {c} in a few sentences.", "Explain {c} in one sentence.", "{c}?", "{c}",
    "Why do I need {c}?", "Explain how {c} works.", "Tell me how {c} works.",
    "Do you know {c}?", "How do you explain {c}?",
]
CONCEPT_FORMS = [
    "How does {c} work in asyncllm?", "Does asyncllm have {c}?", "Does asyncllm support {c}?",
    "What is {c} in asyncllm?", "How does asyncllm use {c}?", "Does asyncllm use {c}?",
    "How does asyncllm do {c}?", "Explain {c} in asyncllm.", "Why does asyncllm use {c}?",
]
# The names of a concept, other questions about it, and the answer to all of them.
CONCEPTS: list[tuple[list[str], list[str], str]] = [
    (["continuous batching", "batching", "dynamic batching", "a batch"],
     ["How are requests batched?", "How does asyncllm batch requests?", "What is in a batch?"],
     "With continuous batching, the server plans a new batch for every step. A new request joins "
     "at the next step, and a finished one leaves at once, so nobody waits for the longest answer "
     "and the GPU stays busy."),
    (["a paged KV cache", "the paged KV cache", "paged attention", "PagedAttention", "the KV cache",
      "KV caching", "a KV cache", "the KV cache of asyncllm", "KV cache", "the cache"],
     ["What are KV pages?", "Why is the KV cache paged?", "What are pages?"],
     "The KV cache keeps the keys and values of all tokens so far, so that each step computes only "
     "the new token. It is cut into small pages. A request takes pages as it grows and gives them "
     "back when it ends, so little memory is wasted."),
    (["chunked prefill", "prefill", "the prefill"],
     ["What happens with a long prompt?", "How does asyncllm handle long prompts?"],
     "Prefill means computing the whole prompt before the first token of the answer. Chunked "
     "prefill cuts a long prompt into pieces and mixes them with the other requests' steps, so "
     "that one long prompt does not stop everybody else."),
    (["the scheduler", "scheduling", "the scheduler of asyncllm", "a scheduler"],
     ["How does asyncllm schedule requests?", "Which request comes first?"],
     "The scheduler decides which requests run in the next step. Running requests get their next "
     "token first, and waiting prompts share the rest of the token budget."),
    (["streaming", "SSE", "token streaming", "server-sent events"],
     ["How does streaming work?", "What is a stream?", "Why do answers stream?"],
     "Streaming means that you see each piece of an answer as soon as it is made. Send "
     "`\"stream\": true` with your request, and the server sends server-sent events."),
    (["a tool call", "tool calling", "function calling", "tool use", "tool calls"],
     ["Can asyncllm call tools?", "How do tool calls work?", "What are tool calls?",
      "Does asyncllm support tool calls?", "Can you call tools?", "How do I use tools?",
      "How do I give you a tool?", "Can you use tools?", "Do you have tools?"],
     "You send a list of tools with your request. The model answers with a tool call: a name and "
     "arguments in JSON. Your program runs the tool and sends the result back, and then the model "
     "answers in words."),
    (["cancellation", "cancelling a request"],
     ["What happens when I cancel a request?", "Can I cancel a request?", "How do I cancel a "
      "request?", "What happens if I close the connection?", "How do I stop a request?"],
     "When you close the connection, the request leaves the batch at the next step and its pages "
     "become free."),
    (["preemption"],
     ["What happens when the memory is full?", "What happens when the KV cache is full?"],
     "When the pages run out, the youngest request gives its pages back and comes later with its "
     "tokens. The oldest one always goes on."),
]
# What the model explains without a word on whether asyncllm has it.
GENERAL: list[tuple[list[str], str]] = [
    (["a prefix cache", "the prefix cache", "prefix caching", "automatic prefix caching"],
     "A prefix cache keeps the pages of finished requests. When a new prompt starts with the same "
     "tokens, such as a system message or an earlier chat, it uses these pages again and only the "
     "rest is computed."),
    (["a token", "tokens"],
     "A token is a small piece of text: a word, a letter or a sign. I read and write one token "
     "after another."),
    (["temperature", "the temperature", "sampling"],
     "Sampling means choosing the next token by chance. The higher the temperature, the more "
     "surprising the answer; with temperature 0 it is always the same."),
    (["inference"],
     "Inference means running a trained model: it reads a prompt and writes an answer."),
]
OTHERS = ["quantization", "LoRA", "tensor parallelism", "several GPUs", "speculative decoding",
          "prefix caching", "JSON mode", "structured outputs", "embeddings", "images", "vision",
          "audio", "beam search", "Windows", "AMD GPUs", "TPUs", "GGUF", "AWQ", "FP8", "int8",
          "vLLM", "Kubernetes", "Ray", "gRPC", "websockets", "fine-tuning", "training",
          "guided decoding", "logprobs", "reasoning", "Mamba", "DeepSeek", "Whisper", "BERT"]


def about_asyncllm(rng: random.Random) -> Messages:
    """Ask about the server that this model ships with."""
    roll = rng.random()
    if roll < 0.3:
        names, others, answer = pick(rng, CONCEPTS)
        forms = GENERAL_FORMS if rng.random() < 0.7 else CONCEPT_FORMS
        question = pick(rng, forms).format(c=pick(rng, names))
        if rng.random() < 0.25:
            question = pick(rng, others)
        return ask(casual(rng, question), answer)
    if roll < 0.35:
        names, answer = pick(rng, GENERAL)
        return ask(casual(rng, pick(rng, GENERAL_FORMS).format(c=pick(rng, names))), answer)
    if roll < 0.4:
        thing = pick(rng, OTHERS) if rng.random() < 0.6 else any_word(rng, 3, 9)
        question = pick(rng, ["Does asyncllm support {w}?", "Does asyncllm have {w}?",
                              "Can asyncllm do {w}?", "Does asyncllm work with {w}?",
                              "Is there {w} in asyncllm?", "How do I use {w} with asyncllm?"])
        return ask(casual(rng, question.format(w=thing)), README)
    questions, answer = pick(rng, SERVER)
    return ask(casual(rng, pick(rng, questions)), answer)
