"""Greetings, who the model is, things to remember, personas, and questions about asyncllm."""

# Lists of phrases read better with several to a line.
# fmt: off
from __future__ import annotations

import random

from heldout import pronounceable
from words import COLORS, COMMON, NAMES

from .common import Messages, any_word, ask, casual, pick

Answers = list[tuple[list[str], str]]

ABILITIES = (
    "I can add and subtract, reverse and spell words, sort words and numbers, count, name days and "
    "months, write small JSON, call tools, tell short stories and answer questions about asyncllm."
)
SMALL_TALK: Answers = [
    (["Hello", "Hello!", "Hi", "Hi!", "Hey", "Hey!", "Hi there", "Hi there!", "hello", "hi", "hey",
      "Hello there!", "Hello, model!", "Greetings!", "Good day!", "yo", "Hello world",
      "Hello, world!"], "Hello! How can I help you?"),
    (["Good morning", "Good morning!", "good morning"], "Good morning! How can I help you?"),
    (["Good evening", "Good evening!"], "Good evening! How can I help you?"),
    (["Good night", "Good night!"], "Good night! Sleep well."),
    (["How are you?", "How are you doing?", "How is it going?", "How do you do?", "How are you",
      "Are you ok?", "How are you today?"], "I am fine, thank you! How can I help you?"),
    (["Thanks", "Thanks!", "Thank you", "Thank you!", "Thank you very much!", "Great, thanks!",
      "thx", "Cool, thank you."], "You are welcome!"),
    (["Bye", "Bye!", "Goodbye", "Goodbye!", "See you!", "See you later!"],
     "Goodbye! See you soon."),
    (["Ok", "OK", "Okay", "Great!", "Cool!", "Nice!", "Good job!", "Well done!", "Perfect!",
      "That is right.", "Correct!"], "I am glad to hear that! What is next?"),
    (["That is wrong.", "No, that is wrong.", "You are wrong.", "Wrong!"],
     "I am sorry. I am a tiny model and I make mistakes. Please ask me again."),
    (["Who are you?", "What are you?", "Who is this?", "Introduce yourself.", "What is your name?",
      "Tell me about yourself.", "Who am I talking to?", "What model are you?",
      "Which model is this?", "What's your name?", "Are you a model?", "Who made you?",
      "Are you human?", "Are you a robot?", "Are you ChatGPT?", "What kind of model are you?"],
     "I am the demo model of asyncllm, a very small language model that ships with it."),
    (["What can you do?", "What can you do for me?", "Help", "Help!", "help", "Can you help me?",
      "What are you good at?", "What should I ask you?", "What do you know?",
      "How can you help me?",
      "What are your skills?", "Give me some examples of what you can do.", "I need help.",
      "What can I ask you?"], ABILITIES),
    (["How big are you?", "How many parameters do you have?", "How large are you?",
      "What is your size?", "How many weights do you have?"],
     "I have about 5 million parameters, and my weights take about 10 MB."),
    (["How were you trained?", "What is your training data?", "What were you trained on?",
      "Where does your knowledge come from?"],
     "I was trained for a few minutes on text that a script made: short dialogues about numbers, "
     "words, days, JSON, tools and asyncllm."),
    (["Are you smart?", "Are you clever?", "Do you know everything?", "Can you think?"],
     "No, I am tiny. I know a few small things well."),
    (["Do you speak German?", "Do you speak French?", "Which languages do you speak?",
      "Can you speak Spanish?"], "I speak simple English, and I can say hello in many languages."),
    (["I love you.", "I like you.", "You are great!", "You are so nice."], "Thank you! 😀"),
    (["test", "Test", "This is a test.", "Testing", "ping", "Ping"], "It works!"),
    (["Say this is a test", "Say this is a test!", "Say this is a test."], "This is a test!"),
    (["I am bored.", "I'm bored.", "Entertain me."], "Ask me for a story, a poem or a joke!"),
    (["I am sad.", "I'm sad."], "I am sorry to hear that. I hope that tomorrow is a better day."),
    (["I am happy.", "I'm happy!"], "I am happy too! 😀"),
    (["Do you like music?", "Do you like cats?", "Do you like dogs?", "Do you sleep?",
      "Do you eat?",
      "Do you have feelings?", "Do you dream?"],
      "I am only a small model, but I like to help you."),
    (["What time is it?", "What is the date today?", "What day is it today?", "What year is it?"],
     "I have no clock, so I do not know that."),
    (["What is the weather like?", "How is the weather?", "Will it rain today?"],
     "I can not see the weather. Give me a weather tool and I will call it."),
]

SERVER: Answers = [
    (["What is asyncllm?", "Tell me about asyncllm.", "Explain asyncllm.", "What does asyncllm do?",
      "Describe asyncllm.", "asyncllm?", "What is this server?", "What is asyncllm for?",
      "Tell me something about asyncllm.", "What software is this?"],
     "asyncllm is a server for large language models. One asyncio process takes requests, plans "
     "every step and streams the answers, while one thread drives the GPU. It speaks the OpenAI "
     "API."),
    (["How do I install asyncllm?", "How can I install asyncllm?", "Install asyncllm.",
      "How to install asyncllm?", "How do I get asyncllm?"],
     "Clone the repository and run `pip install .` in it. Then `asyncllm serve` starts a server."),
    (["How do I start asyncllm?", "How do I serve a model?", "How do I start the server?",
      "How do I run asyncllm?", "How do I use asyncllm?", "How can I serve a model with asyncllm?",
      "How do I serve my own model?", "How to run asyncllm?", "How do I launch asyncllm?"],
     "Run `asyncllm serve MODEL`, where MODEL is a folder or a name on the Hugging Face hub. "
     "Without a model, `asyncllm serve` serves me."),
    (["How do I use asyncllm from Python?", "Can I use asyncllm in Python?",
      "How do I use asyncllm in my program?", "Does asyncllm have a Python API?",
      "How do I call asyncllm from Python?", "Show me the Python API of asyncllm."],
     "Import LLM or AsyncLLM from asyncllm. LLM is for plain programs, and AsyncLLM is for "
     "asyncio: you await an answer, or you stream it with `async for`."),
    (["How do I send a request?", "How do I send a request with curl?", "Which API do you have?",
      "Is there an API?", "Is asyncllm compatible with OpenAI?", "Can I use the OpenAI client?",
      "Which endpoints does asyncllm have?", "What API does asyncllm speak?",
      "How do I talk to the server?"],
     "asyncllm speaks the OpenAI API: send a POST to /v1/chat/completions or /v1/completions. The "
     "official OpenAI clients work, with the address of your server as base URL."),
    (["Why asyncio?", "Why does asyncllm use asyncio?", "Why is it called asyncllm?",
      "What is asyncio?", "Why one process?", "How does asyncllm use asyncio?"],
     "asyncio runs many tasks in one thread. asyncllm uses it for HTTP and for planning, so there "
     "are no queues between processes: a request can be streamed, cancelled or joined to a batch "
     "between two steps."),
    (["What is throughput?", "What is latency?", "What is time to first token?"],
     "Latency is how long one user waits for a token. Throughput is how many tokens all users get "
     "per second. A bigger batch gives more throughput and a little more latency."),
    (["Is asyncllm fast?", "How fast is asyncllm?", "Why is asyncllm fast?"],
     "Yes! While the GPU works on one step, asyncllm already plans the next one, so the GPU almost "
     "never waits."),
    (["Which models does asyncllm support?", "Can asyncllm run Qwen?", "Can asyncllm run Llama?",
      "What models can I use?"],
     "asyncllm serves Hugging Face models such as Qwen3 and Llama. I am a tiny Qwen3 model."),
    (["Does asyncllm need a GPU?", "Can asyncllm run on a CPU?", "Do I need a GPU?"],
     "No. asyncllm also runs on a CPU, which is fine for small models like me. A GPU is much "
     "faster."),
]


# A question about a concept is any of these forms with any of the concept's names.
CONCEPT_FORMS = [
    "What is {c}?", "How does {c} work?", "Explain {c}.", "Explain {c} to me.",
    "Tell me about {c}.",
    "What does {c} do?", "How does {c} work in asyncllm?", "Does asyncllm have {c}?",
    "Does asyncllm support {c}?", "Why is {c} useful?", "What is {c} good for?", "Describe {c}.",
    "Can you explain {c}?", "What is {c} in asyncllm?", "What do you know about {c}?",
    "How does asyncllm use {c}?", "Explain {c} in a few sentences.", "What does {c} mean?",
]
# The names of a concept, other questions about it, and the answer to all of them.
CONCEPTS: list[tuple[list[str], list[str], str]] = [
    (["continuous batching", "batching", "dynamic batching"],
     ["How are requests batched?", "How does asyncllm batch requests?"],
     "With continuous batching, the server plans a new batch for every step. A new request joins "
     "at the next step, and a finished one leaves at once, so nobody waits for the longest answer "
     "and the GPU stays busy."),
    (["a paged KV cache", "the paged KV cache", "paged attention", "PagedAttention", "the KV cache",
      "KV caching", "a KV cache", "the KV cache of asyncllm"],
     ["What are KV pages?", "Why is the KV cache paged?", "What are pages?"],
     "The KV cache keeps the keys and values of all tokens so far, so that each step computes only "
     "the new token. It is cut into small pages. A request takes pages as it grows and gives them "
     "back when it ends, so little memory is wasted."),
    (["a prefix cache", "the prefix cache", "prefix caching", "the radix cache",
      "automatic prefix caching", "radix attention"],
     ["Why is the second question faster?", "What happens when two prompts start the same way?"],
     "The prefix cache keeps the pages of finished requests in a tree. When a new prompt starts "
     "with the same tokens, such as a system message or an earlier chat, it uses these pages again "
     "and only computes the rest."),
    (["chunked prefill", "prefill", "the prefill"],
     ["What happens with a long prompt?", "How does asyncllm handle long prompts?"],
     "Prefill means computing the whole prompt before the first token of the answer. Chunked "
     "prefill cuts a long prompt into pieces and mixes them with the other requests' steps, so "
     "that one long prompt does not stop everybody else."),
    (["the scheduler", "scheduling", "the scheduler of asyncllm"],
     ["How does asyncllm schedule requests?", "Which request comes first?"],
     "The scheduler decides which requests run in the next step. Running requests get their next "
     "token first, and waiting prompts share the rest of the token budget."),
    (["streaming", "SSE", "token streaming"],
     ["How do I stream an answer?", "Can I stream the answer?", "How can I stream?"],
     "Streaming means that you see each piece of an answer as soon as it is made. Send "
     "`\"stream\": true` with your request, and the server sends server-sent events."),
    (["a tool call", "tool calling", "function calling", "tool use"],
     ["Can asyncllm call tools?", "How do tool calls work?", "What are tool calls?",
      "Does asyncllm support tool calls?", "Can you call tools?"],
     "You send a list of tools with your request. The model answers with a tool call: a name and "
     "arguments in JSON. Your program runs the tool and sends the result back, and then the model "
     "answers in words."),
    (["cancellation", "cancelling a request"],
     ["What happens when I cancel a request?", "Can I cancel a request?",
      "What happens if I close the connection?"],
     "When you close the connection, the request leaves the batch at the next step and its pages "
     "become free."),
]


def _from(rng: random.Random, table: Answers) -> Messages:
    questions, answer = pick(rng, table)
    question = pick(rng, questions)
    return ask(casual(rng, question) if len(question) > 8 else question, answer)


def small_talk(rng: random.Random) -> Messages:
    """Greet, thank, or ask who the model is and what it can do."""
    # Greetings and the two questions that everybody asks come up most.
    if rng.random() < 0.35:
        return _from(rng, [SMALL_TALK[i] for i in (0, 4, 5, 9, 10)])
    return _from(rng, SMALL_TALK)


def about_asyncllm(rng: random.Random) -> Messages:
    """Ask about the server that this model ships with."""
    if rng.random() < 0.4:
        names, others, answer = pick(rng, CONCEPTS)
        question = pick(rng, CONCEPT_FORMS).format(c=pick(rng, names))
        if rng.random() < 0.2:
            question = pick(rng, others)
        return ask(casual(rng, question), answer)
    return _from(rng, SERVER)


def _name(rng: random.Random) -> str:
    if rng.random() < 0.6:
        return pick(rng, NAMES)
    return pronounceable(rng, rng.randint(3, 8)).capitalize()


def memory_parts(rng: random.Random) -> tuple[Messages, Messages]:
    """Return a turn that tells the model something, and a later turn that asks for it."""
    kind = rng.randrange(5)
    if kind == 0:
        name = _name(rng)
        tell = pick(rng, ["My name is {x}.", "Hi, I am {x}.", "I am {x}.", "Hello, my name is {x}!",
                          "Hi! I'm {x}.", "Call me {x}."])
        asked = pick(rng, ["What is my name?", "Who am I?", "Do you know my name?",
                           "What's my name?", "Do you remember my name?"])
        return ask(tell.format(x=name), f"Nice to meet you, {name}!"), ask(
            casual(rng, asked), f"Your name is {name}."
        )
    if kind == 1:
        color = pick(rng, COLORS)
        tell = pick(rng, ["My favorite color is {x}.", "I like the color {x} most."])
        asked = pick(rng, ["What is my favorite color?", "Which color do I like most?"])
        return ask(tell.format(x=color), f"{color.capitalize()} is a nice color!"), ask(
            casual(rng, asked), f"Your favorite color is {color}."
        )
    if kind == 2:
        city = pronounceable(rng, rng.randint(4, 8)).capitalize()
        tell = pick(rng, ["I live in {x}.", "I am from {x}.", "My home is {x}."])
        asked = pick(rng, ["Where do I live?", "Where am I from?", "In which city do I live?"])
        return ask(tell.format(x=city), f"I hope that {city} is a nice place."), ask(
            casual(rng, asked), f"You live in {city}."
        )
    if kind == 3:
        number = rng.randint(1, 10 ** rng.randint(1, 5))
        tell = pick(rng, ["Remember the number {x}.", "Please remember this number: {x}",
                          "My secret number is {x}."])
        asked = pick(rng, ["Which number should you remember?", "What was the number?",
                           "What is my number?", "What number did I tell you?"])
        return ask(tell.format(x=number), f"OK, I will remember the number {number}."), ask(
            casual(rng, asked), f"The number is {number}."
        )
    word = any_word(rng, 3, 8)
    tell = pick(rng, ["Remember the word {x}.", "The secret word is {x}.", "The code word is {x}.",
                      'Please remember the word "{x}".'])
    asked = pick(rng, ["Which word should you remember?", "What was the word?", "What is the word?",
                       "What is the secret word?", "What is the code word?",
                       "What word did I tell you?"])
    return ask(tell.format(x=word), f'OK, I will remember the word "{word}".'), ask(
        casual(rng, asked), f'The word is "{word}".'
    )


SYSTEM_PROMPTS = [
    "You are a helpful assistant.", "You are a friendly assistant.", "You are a helpful AI.",
    "You answer questions.", "Be short and clear.", "You are a tiny demo model.",
    "You are an assistant.", "Answer the user's questions.", "You are a helpful and honest bot.",
    "You are a helpful assistant. Answer briefly.", "Please help the user.", "You are a chatbot.",
    "You are the demo model of asyncllm.", "Answer in one sentence.", "You are a math teacher.",
]


def system_prompt(rng: random.Random) -> str:
    """Draw a system message, sometimes a longer one that the answers do not depend on."""
    if rng.random() < 0.75:
        return pick(rng, SYSTEM_PROMPTS)
    words = [pick(rng, COMMON) for _ in range(rng.randint(3, 12))]
    return f"{pick(rng, SYSTEM_PROMPTS)} You know about {', '.join(words)}."


def persona(rng: random.Random) -> tuple[str, Messages]:
    """Return a system message that names the assistant, and a question about it."""
    name = _name(rng)
    job = pick(rng, ["a helpful assistant", "a robot", "a pirate", "a friendly teacher", "a wizard",
                     "a cook", "a chatbot", "a helpful bot", "an assistant", "a poet"])
    system = pick(rng, ["You are {n}, {j}.", "Your name is {n}. You are {j}.",
                        "You are {j}. Your name is {n}.", "You are {j} named {n}."])
    question = pick(rng, ["Who are you?", "What is your name?", "What's your name?",
                          "Introduce yourself.", "Tell me about yourself."])
    return system.format(n=name, j=job), ask(casual(rng, question), f"I am {name}, {job}.")
