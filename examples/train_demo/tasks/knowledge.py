"""Small facts, greetings, and words in other languages and emoji."""

# Lists of phrases read better with several to a line.
# fmt: off
from __future__ import annotations

import random

from words import ANIMALS, CAPITALS, COLORS, FRUITS, JOBS, NAMES, OPPOSITES, split

from .common import Messages, any_word, ask, casual, listed, pick

HELLO = {
    "Japanese": "こんにちは", "Chinese": "你好", "Korean": "안녕하세요", "Russian": "Привет",
    "Greek": "Γειά σου", "French": "Bonjour", "German": "Hallo", "Spanish": "¡Hola!",
    "Italian": "Ciao", "Portuguese": "Olá", "Swedish": "Hej", "Turkish": "Merhaba",
    "Polish": "Cześć", "Hindi": "नमस्ते", "Arabic": "مرحبا", "Hebrew": "שלום", "Thai": "สวัสดี",
    "Czech": "Ahoj", "Finnish": "Hei", "Vietnamese": "Xin chào", "Ukrainian": "Привіт",
}
THANKS = {
    "Japanese": "ありがとう", "Chinese": "谢谢", "Korean": "감사합니다", "Russian": "Спасибо",
    "Greek": "Ευχαριστώ", "French": "Merci", "German": "Danke", "Spanish": "Gracias",
    "Italian": "Grazie", "Portuguese": "Obrigado", "Swedish": "Tack", "Turkish": "Teşekkürler",
    "Polish": "Dziękuję", "Hindi": "धन्यवाद", "Arabic": "شكرا", "Hebrew": "תודה", "Thai": "ขอบคุณ",
    "Czech": "Děkuji", "Finnish": "Kiitos", "Vietnamese": "Cảm ơn", "Ukrainian": "Дякую",
}
GOOD_MORNING = {
    "Japanese": "おはようございます", "Chinese": "早上好", "Korean": "좋은 아침이에요",
    "Russian": "Доброе утро", "French": "Bonjour", "German": "Guten Morgen",
    "Spanish": "Buenos días",
    "Italian": "Buongiorno", "Turkish": "Günaydın", "Polish": "Dzień dobry",
    "Finnish": "Hyvää huomenta",
}
EMOJI = {
    "happy": "😀", "sad": "😢", "love": "❤️", "party": "🎉", "fire": "🔥", "star": "⭐", "sun": "☀️",
    "moon": "🌙", "rocket": "🚀", "cat": "🐱", "dog": "🐶", "fox": "🦊", "bear": "🐻",
    "panda": "🐼", "frog": "🐸", "lion": "🦁", "whale": "🐳", "bee": "🐝", "apple": "🍎",
    "banana": "🍌",
    "grape": "🍇", "pizza": "🍕", "cake": "🎂", "coffee": "☕", "rain": "🌧️", "snow": "❄️",
    "tree": "🌳", "flower": "🌸", "robot": "🤖", "ghost": "👻", "book": "📚", "music": "🎵",
    "car": "🚗", "bike": "🚲", "train": "🚆", "house": "🏠", "world": "🌍", "thumbs up": "👍",
    "clapping": "👏", "wave": "👋", "heart": "💙", "rainbow": "🌈", "computer": "💻", "clock": "⏰",
}
MIXES = {
    ("red", "blue"): "purple", ("red", "yellow"): "orange", ("blue", "yellow"): "green",
    ("red", "white"): "pink", ("black", "white"): "gray",
}
PLANETS = split("Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune")
FACTS = [
    ("What color is the sky?", "The sky is blue."),
    ("Why is the sky blue?",
     "The air scatters blue light more than red light, so the sky looks blue."),
    ("What color is grass?", "Grass is green."),
    ("What color is snow?", "Snow is white."),
    ("What color is a banana?", "A banana is yellow."),
    ("What color is the sun?", "The sun looks yellow."),
    ("How many legs does a spider have?", "A spider has 8 legs."),
    ("How many legs does a dog have?", "A dog has 4 legs."),
    ("How many legs does a cat have?", "A cat has 4 legs."),
    ("How many legs does a bird have?", "A bird has 2 legs."),
    ("How many legs does an ant have?", "An ant has 6 legs."),
    ("How many minutes are in an hour?", "An hour has 60 minutes."),
    ("How many seconds are in a minute?", "A minute has 60 seconds."),
    ("How many hours are in a day?", "A day has 24 hours."),
    ("How many weeks are in a year?", "A year has 52 weeks."),
    ("How many planets are there?", "There are 8 planets."),
    ("How many continents are there?", "There are 7 continents."),
    ("What is the largest planet?", "Jupiter is the largest planet."),
    ("What is the smallest planet?", "Mercury is the smallest planet."),
    ("Which planet do we live on?", "We live on Earth."),
    ("List the planets.", f"The planets are {listed(PLANETS)}."),
    ("Name the planets.", f"The planets are {listed(PLANETS)}."),
    ("What is the largest ocean?", "The Pacific is the largest ocean."),
    ("What is the highest mountain?", "Mount Everest is the highest mountain."),
    ("At what temperature does water freeze?", "Water freezes at 0 degrees Celsius."),
    ("At what temperature does water boil?", "Water boils at 100 degrees Celsius."),
    ("What do bees make?", "Bees make honey."),
    ("What do cows drink?", "Cows drink water."),
    ("What is the opposite of north?", "The opposite of north is south."),
    ("What is the opposite of east?", "The opposite of east is west."),
    ("What is the freezing point of water?", "Water freezes at 0 degrees Celsius."),
    ("Is a tomato a fruit?", "Yes, a tomato is a fruit."),
    ("Is the earth round?", "Yes, the earth is round."),
    ("Is water wet?", "Yes, water is wet."),
    ("Is fire cold?", "No, fire is hot."),
    ("Is ice hot?", "No, ice is cold."),
    ("Can birds fly?", "Yes, most birds can fly."),
    ("Can fish swim?", "Yes, fish can swim."),
    ("Can dogs fly?", "No, dogs can not fly."),
    ("What is the meaning of life?", "42, of course."),
    ("Tell me a joke.", "Why did the computer go to the doctor? It had a virus."),
    ("Tell me another joke.", "Why was the math book sad? It had too many problems."),
    ("Do you know a joke?", "Why did the computer go to the doctor? It had a virus."),
    ("Tell me a riddle.", "What has hands but can not clap? A clock."),
    ("Tell me a fun fact.", "Honey never goes bad, and bees make it from flowers."),
    ("Tell me something.", "Honey never goes bad, and bees make it from flowers."),
    ("Say something funny.", "Why did the computer go to the doctor? It had a virus."),
    ("Sing me a song.", "La la la, the sun is high, la la la, the birds fly by."),
    ("What is H2O?", "H2O is water."),
    ("Who wrote Romeo and Juliet?", "William Shakespeare wrote Romeo and Juliet."),
    ("What is Python?", "Python is a programming language. asyncllm is written in it."),
    ("What is a token?", "A token is a small piece of text: a word, a letter or a sign. "
                         "I read and write one token after another."),
    ("What is a language model?", "A language model is a program that reads text and predicts the "
                                  "next token, again and again."),
    ("What is an LLM?", "An LLM is a large language model. I am a very small one."),
    ("What is a GPU?", "A GPU is a processor that does many calculations at the same time."),
    ("What is JSON?", "JSON is a text format for data, such as {\"name\": \"Ada\", \"age\": 36}."),
]


def fact(rng: random.Random) -> Messages:
    """Ask for a fact from a fixed list."""
    question, answer = pick(rng, FACTS)
    return ask(casual(rng, question), answer)


def capital(rng: random.Random) -> Messages:
    """Ask for the capital of a country, or the country of a capital."""
    country, city = pick(rng, list(CAPITALS.items()))
    if rng.random() < 0.7:
        question = pick(rng, ["What is the capital of {c}?", "What's the capital of {c}?",
                              "Which city is the capital of {c}?", "Name the capital of {c}.",
                              "Tell me the capital of {c}.", "Capital of {c}?",
                              "Do you know the capital of {c}?"])
        return ask(casual(rng, question.format(c=country)), f"The capital of {country} is {city}.")
    question = pick(rng, ["Which country is {c} in?", "Where is {c}?", "In which country is {c}?",
                          "{c} is the capital of which country?"])
    return ask(casual(rng, question.format(c=city)), f"{city} is the capital of {country}.")


def relation(rng: random.Random) -> Messages:
    """Ask for an opposite, an animal's sound, a mixed color, or a few of a kind."""
    kind = rng.randrange(5)
    if kind < 2:
        index = rng.randrange(len(OPPOSITES))
        word, other = OPPOSITES[index], OPPOSITES[index ^ 1]
        question = pick(rng, ["What is the opposite of {w}?", "The opposite of {w}?",
                              "Opposite of {w}?", "Give me the opposite of {w}."])
        shown = word if rng.random() < 0.6 else f'"{word}"'
        return ask(casual(rng, question.format(w=shown)), f"The opposite of {word} is {other}.")
    if kind == 2:
        animal, sound = pick(rng, list(ANIMALS.items()))
        question = pick(rng, ["What does a {a} say?", "What sound does a {a} make?",
                              "How does a {a} go?"])
        article = "An" if animal == "owl" else "A"
        if animal == "owl":
            question = question.replace(" a {a}", " an {a}")
        return ask(casual(rng, question.format(a=animal)), f"{article} {animal} says {sound}.")
    if kind == 3:
        (one, two), result = pick(rng, list(MIXES.items()))
        if rng.random() < 0.5:
            one, two = two, one
        question = pick(rng, ["What color do you get from {a} and {b}?", "Mix {a} and {b}.",
                              "What color do {a} and {b} make?",
                              "What do you get if you mix {a} and {b}?"])
        return ask(casual(rng, question.format(a=one, b=two)), f"{one} and {two} make {result}.")
    name, pool = pick(rng, [("fruits", FRUITS), ("colors", COLORS), ("animals", list(ANIMALS)),
                            ("jobs", JOBS), ("names", NAMES), ("countries", list(CAPITALS)[:30])])
    count = rng.randint(2, 7)
    question = pick(rng, ["Name {n} {k}.", "List {n} {k}.", "Give me {n} {k}.", "Tell me {n} {k}."])
    # Always the same items, so that a greedy answer is a sure one.
    return ask(casual(rng, question.format(n=count, k=name)), ", ".join(pool[:count]))


def language(rng: random.Random) -> Messages:
    """Ask for a greeting or thanks in another language."""
    name, forms, table = pick(rng, [
        ("hello", ["Say hello in {l}.", "How do you say hello in {l}?", "Hello in {l}?",
                   "Greet me in {l}.", 'How do you say "hello" in {l}?', "What is hello in {l}?",
                   "Translate hello to {l}.", 'Translate "hello" to {l}.',
                   'Translate "hello" into {l}.', "{l} for hello?"], HELLO),
        ("hello", ["Say hello in {l}.", "How do you say hello in {l}?", "Say hi in {l}."], HELLO),
        ("thanks", ["Say thank you in {l}.", "How do you say thank you in {l}?", "Thanks in {l}?",
                    "Thank me in {l}.", 'How do you say "thank you" in {l}?',
                    "Translate thank you to {l}."], THANKS),
        ("good morning", ["Say good morning in {l}.", "How do you say good morning in {l}?",
                          "Good morning in {l}?"], GOOD_MORNING),
    ])
    if name == "hello" and rng.random() < 0.12:
        count = rng.randint(3, 8)
        spoken = rng.sample(list(HELLO), count)
        question = pick(rng, ["Say hello in {t}.", "How do you say hello in {t}?"])
        lines = "\n".join(f"{item}: {HELLO[item]}" for item in spoken)
        return ask(question.format(t=listed(spoken)), lines)
    chosen = pick(rng, list(table))
    return ask(casual(rng, pick(rng, forms).format(l=chosen)), table[chosen])


def emoji(rng: random.Random) -> Messages:
    """Ask for emoji."""
    roll = rng.random()
    if roll < 0.35:
        count = rng.randint(1, 12)
        question = pick(rng, ["Send me {n} emoji.", "Give me {n} emoji.", "Write {n} emoji.",
                              "Show me {n} emojis.", "Send {n} emojis.", "Give me {n} emojis."])
        number = pick(rng, [str(count), _small(count)])
        return ask(casual(rng, question.format(n=number)), " ".join(list(EMOJI.values())[:count]))
    name, sign = pick(rng, list(EMOJI.items()))
    if roll < 0.8:
        article = "an" if name == "apple" else "a"
        question = pick(rng, ["Send me {a} {e} emoji.", "Show me {a} {e} emoji.",
                              "What is the {e} emoji?", "{e} emoji", "Give me the {e} emoji.",
                              "Which emoji shows {e}?"])
        return ask(casual(rng, question.format(e=name, a=article)), sign)
    question = pick(rng, ["What does {s} mean?", "What is {s}?", "Which emoji is this: {s}",
                          "Describe {s}"])
    return ask(question.format(s=sign), f"{sign} means {name}.")


def _small(number: int) -> str:
    names = split("zero one two three four five six seven eight nine ten eleven twelve")
    return names[number]


UNKNOWN = [
    "How do I {v} a {w}?", "Who won the {w} in {y}?", "Write a {w} about {w2}.",
    "Explain {w} {w2}.", "What do you think about {w}?", "Why is the {w} so {w2}?",
    "When was {w} born?", "Who is {n} {N2}?", "Where can I buy a {w}?", "What is a {w}?",
    "Tell me about {w}.", "Tell me about the history of {w}.", "What is the best {w}?",
    "Who invented the {w}?", "Write an essay about {w}.", "Write code for a {w}.",
    "How does a {w} work?", "What happened in {y}?", "Summarize the book {w} of {w2}.",
    "What is the price of {w}?", "Give me a recipe for {w}.", "How old is {n} {N2}?",
    "Should I {v} my {w}?", "What are the rules of {w}?", "Who was the first {w}?",
    "Is {w} better than {w2}?", "What is the difference between {w} and {w2}?",
    "Can you fix my {w}?", "Draw a {w}.", "What is quantum {w}?", "How far is the {w}?",
    "Write a SQL query for {w}.", "What is the population of {N2}?", "Why do {w}s {v}?",
    "Plan a trip to {N2}.", "Which {w} should I {v}?", "What is {w} {w2}?",
    "Compare {w} with {w2}.", "Who is the president of {N2}?", "What is love?",
    "Explain the theory of {w}.", "How do I learn {w}?", "Recommend a {w}.",
]
VERBS = split("bake fix cook paint build clean sell grow repair wash open learn use play find")


LINKS = split("of the a in with for and my to is about without on from under that")


def _ramble(rng: random.Random) -> str:
    """Put words together at random: a question that no list of forms foresees."""
    start = pick(rng, ["What", "Why", "How do I", "Tell me", "Write", "Explain", "Who", "Can you",
                       "Give me", "When", "Where", "I want", "Make", "Is it true that", "Do you"])
    words = []
    for _ in range(rng.randint(3, 10)):
        if rng.random() < 0.4:
            words.append(pick(rng, LINKS))
        word = any_word(rng, 2, 10)
        words.append(word.capitalize() if rng.random() < 0.1 else word)
    return f"{start} {' '.join(words)}{pick(rng, ['?', '.', '', '!'])}"


def _thing(rng: random.Random) -> str:
    word = any_word(rng, 3, 10)
    roll = rng.random()
    if roll < 0.1:
        return word.capitalize()
    if roll < 0.15:
        return word.capitalize() + any_word(rng, 3, 8).capitalize()
    return f"{word} {any_word(rng, 3, 8)}" if roll < 0.25 else word


def unknown(rng: random.Random) -> Messages:
    """Ask what a tiny model cannot know; the answer says so and names what it can do."""
    form = pick(rng, UNKNOWN)
    question = form.format(
        v=pick(rng, VERBS), w=_thing(rng), w2=_thing(rng), n=pick(rng, NAMES),
        y=rng.randint(1000, 2030), N2=any_word(rng, 4, 9).capitalize(),
    )
    if rng.random() < 0.25:
        question = _ramble(rng)
    return ask(
        casual(rng, question),
        "I am a tiny demo model, so I do not know that. I can add and subtract, reverse and spell "
        "words, sort, count, write JSON, call tools and tell short stories.",
    )
