"""Small facts, greetings, and words in other languages and emoji."""

# Lists of phrases read better with several to a line.
# fmt: off
from __future__ import annotations

import random

from words import ANIMALS, CAPITALS, COLORS, FRUITS, JOBS, NAMES, OPPOSITES, split

from .common import Answers, Messages, ask, casual, listed, pick

HELLO = {
    "Japanese": "こんにちは", "Chinese": "你好", "Korean": "안녕하세요", "Russian": "Привет",
    "Greek": "Γειά σου", "French": "Bonjour", "German": "Hallo", "Spanish": "¡Hola!",
    "Italian": "Ciao", "Portuguese": "Olá", "Swedish": "Hej", "Turkish": "Merhaba",
    "Polish": "Cześć", "Hindi": "नमस्ते", "Arabic": "مرحبا", "Hebrew": "שלום", "Thai": "สวัสดี",
    "Czech": "Ahoj", "Finnish": "Hei", "Vietnamese": "Xin chào", "Ukrainian": "Привіт",
    "Dutch": "Hallo", "Danish": "Hej", "Norwegian": "Hei", "Latin": "Salve", "English": "Hello",
}
THANKS = {
    "Japanese": "ありがとう", "Chinese": "谢谢", "Korean": "감사합니다", "Russian": "Спасибо",
    "Greek": "Ευχαριστώ", "French": "Merci", "German": "Danke", "Spanish": "Gracias",
    "Italian": "Grazie", "Portuguese": "Obrigado", "Swedish": "Tack", "Turkish": "Teşekkürler",
    "Polish": "Dziękuję", "Hindi": "धन्यवाद", "Arabic": "شكرا", "Hebrew": "תודה", "Thai": "ขอบคุณ",
    "Czech": "Děkuji", "Finnish": "Kiitos", "Vietnamese": "Cảm ơn", "Ukrainian": "Дякую",
    "Dutch": "Dank je", "Danish": "Tak", "Norwegian": "Takk", "Latin": "Gratias",
    "English": "Thank you",
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
# What the answers to questions for a color, for legs, and for the largest or smallest are.
COLORED = {
    "the sky": "blue", "grass": "green", "the grass": "green", "snow": "white", "blood": "red",
    "a banana": "yellow", "the sun": "yellow", "a lemon": "yellow", "an apple": "red",
    "a tomato": "red", "a strawberry": "red", "a cherry": "red", "an orange": "orange",
    "a carrot": "orange", "a frog": "green", "milk": "white", "coal": "black", "the night": "black",
    "chocolate": "brown", "the sea": "blue", "a leaf": "green", "a plum": "purple",
    "an elephant": "gray", "a pig": "pink", "gold": "yellow", "a cloud": "white", "coffee": "brown",
    "a rose": "red", "fire": "red", "a polar bear": "white",
}
COLOR_FORMS = ["What color is", "What is the color of", "Which color is", "What color does",
               "Color of"]
COLOR_QUESTIONS = {form: list(COLORED) for form in COLOR_FORMS}
LEGS = {
    "a spider": 8, "a dog": 4, "a cat": 4, "a bird": 2, "an ant": 6, "a horse": 4, "a cow": 4,
    "a human": 2, "a bee": 6, "a duck": 2, "a fish": 0, "a snake": 0, "an elephant": 4,
    "a sheep": 4,
    "a lion": 4, "a chicken": 2, "a frog": 4, "a mouse": 4, "a pig": 4, "an insect": 6,
    "an octopus": 8, "a crab": 10, "a table": 4, "a chair": 4,
}
BEST_KNOWN = {
    ("largest", "planet"): "Jupiter is the largest planet.",
    ("biggest", "planet"): "Jupiter is the largest planet.",
    ("smallest", "planet"): "Mercury is the smallest planet.",
    ("largest", "ocean"): "The Pacific is the largest ocean.",
    ("biggest", "ocean"): "The Pacific is the largest ocean.",
    ("highest", "mountain"): "Mount Everest is the highest mountain.",
    ("tallest", "mountain"): "Mount Everest is the highest mountain.",
    ("smallest", "prime"): "The smallest prime number is 2.",
}
FACTS: Answers = [
    (["Why is the sky blue?"],
     "The air scatters blue light more than red light, so the sky looks blue."),
    (["How many minutes are in an hour?", "How many minutes does an hour have?",
      "How many minutes are there in an hour?"], "An hour has 60 minutes."),
    (["How many seconds are in a minute?", "How many seconds does a minute have?",
      "How many seconds are there in a minute?"], "A minute has 60 seconds."),
    (["How many hours are in a day?", "How many hours does a day have?",
      "How many hours are there in a day?"], "A day has 24 hours."),
    (["How many weeks are in a year?", "How many weeks does a year have?"],
     "A year has 52 weeks."),
    (["How many days are in a week?", "How many days does a week have?",
      "How many days are there in a week?"], "A week has 7 days."),
    (["How many months are in a year?", "How many months does a year have?"],
     "A year has 12 months."),
    (["How many years are in a century?", "How long is a century?"], "A century has 100 years."),
    (["How many planets are there?", "How many planets are in the solar system?"],
     "There are 8 planets."),
    (["How many continents are there?", "How many continents are on Earth?"],
     "There are 7 continents."),
    (["How many letters are in the alphabet?", "How many letters does the alphabet have?"],
     "The alphabet has 26 letters."),
    (["Which planet do we live on?", "What planet do we live on?"], "We live on Earth."),
    (["List the planets.", "Name the planets.", "What are the planets?",
      "Name all planets.", "List the planets of the solar system."],
     f"The planets are {listed(PLANETS)}."),
    (["At what temperature does water freeze?", "What is the freezing point of water?",
      "When does water freeze?"], "Water freezes at 0 degrees Celsius."),
    (["At what temperature does water boil?", "What is the boiling point of water?",
      "When does water boil?"], "Water boils at 100 degrees Celsius."),
    (["What do bees make?", "What does a bee make?"], "Bees make honey."),
    (["What do cows drink?"], "Cows drink water."),
    (["What is the opposite of north?"], "The opposite of north is south."),
    (["What is the opposite of east?"], "The opposite of east is west."),
    (["Is a tomato a fruit?"], "Yes, a tomato is a fruit."),
    (["Is the earth round?", "Is the earth flat?"], "The earth is round."),
    (["Is water wet?"], "Yes, water is wet."),
    (["Is fire cold?", "Is fire hot?"], "Fire is hot."),
    (["Is ice hot?", "Is ice cold?"], "Ice is cold."),
    (["Can birds fly?", "Can a bird fly?"], "Yes, most birds can fly."),
    (["Can fish swim?", "Can a fish swim?"], "Yes, fish can swim."),
    (["Can dogs fly?"], "No, dogs can not fly."),
    (["What is the meaning of life?", "What's the meaning of life?",
      "What is the answer to everything?"], "42, of course."),
    (["Tell me a joke.", "Do you know a joke?", "Say something funny.", "Tell a joke.", "A joke!",
      "Tell me a joke about computers.", "Make me laugh.", "Joke?", "Can you tell me a joke?",
      "Tell me something funny.", "Do you know any jokes?"],
     "Why did the computer go to the doctor? It had a virus."),
    (["Tell me another joke.", "Another joke, please.", "Another one."],
     "Why was the math book sad? It had too many problems."),
    (["Tell me a riddle.", "Do you know a riddle?"],
     "What has hands but can not clap? A clock."),
    (["Tell me a fun fact.", "Tell me something.", "Tell me something interesting.",
      "Tell me a fact.", "Do you know a fun fact?", "Surprise me."],
     "Honey never goes bad, and bees make it from flowers."),
    (["Sing me a song.", "Sing a song.", "Can you sing a song?"],
     "La la la, the sun is high, la la la, the birds fly by."),
    (["What is H2O?"], "H2O is water."),
    (["Who wrote Romeo and Juliet?"], "William Shakespeare wrote Romeo and Juliet."),
    (["What is Python?"], "Python is a programming language. asyncllm is written in it."),
    (["What is a token?", "What are tokens?"],
     "A token is a small piece of text: a word, a letter or a sign. "
     "I read and write one token after another."),
    (["What is a language model?", "What is a large language model?"],
     "A language model is a program that reads text and predicts the next token, again and again."),
    (["What is an LLM?", "What does LLM stand for?", "What are LLMs?"],
     "An LLM is a large language model. I am a very small one."),
    (["What is a GPU?", "What does GPU stand for?"],
     "A GPU is a processor that does many calculations at the same time."),
    (["What is JSON?"],
     "JSON is a text format for data, such as {\"name\": \"Ada\", \"age\": 36}."),
]


def fact(rng: random.Random) -> Messages:
    """Ask for a fact from a fixed list."""
    roll = rng.random()
    if roll < 0.12:
        thing, color = pick(rng, list(COLORED.items()))
        form = pick(rng, COLOR_FORMS)
        question = f"{form} {thing}{' have' if form.endswith('does') else ''}?"
        return ask(casual(rng, question), f"{thing[0].upper()}{thing[1:]} is {color}.")
    if roll < 0.22:
        animal, legs = pick(rng, list(LEGS.items()))
        question = pick(rng, ["How many legs does {a} have?", "How many legs has {a}?",
                              "How many legs are on {a}?", "Number of legs of {a}?"])
        answer = f"{animal[0].upper()}{animal[1:]} has {legs} legs."
        return ask(casual(rng, question.format(a=animal)), answer)
    if roll < 0.28:
        (best, thing), answer = pick(rng, list(BEST_KNOWN.items()))
        question = pick(rng, ["What is the {b} {t}", "Which is the {b} {t}", "What's the {b} {t}",
                              "Which {t} is the {b}", "Name the {b} {t}", "Tell me the {b} {t}"])
        question = question.format(b=best, t=thing if thing != "prime" else "prime number")
        question += pick(rng, ["", "", " in the world", " of all"]) if thing != "prime" else ""
        return ask(casual(rng, question + "?"), answer)
    questions, answer = pick(rng, FACTS)
    return ask(casual(rng, pick(rng, questions)), answer)


def capital(rng: random.Random) -> Messages:
    """Ask for the capital of a country, or the country of a capital."""
    country, city = pick(rng, list(CAPITALS.items()))
    if rng.random() < 0.7:
        question = pick(rng, ["What is the capital of {c}?", "What's the capital of {c}?",
                              "Which city is the capital of {c}?", "Name the capital of {c}.",
                              "Tell me the capital of {c}.", "Capital of {c}?",
                              "Do you know the capital of {c}?", "What is {s} capital?",
                              "What city is the capital of {c}?", "{c}: capital?",
                              "What is the capital city of {c}?", "Which city is {s} capital?"])
        question = question.replace("{s}", "{c}'s")
        return ask(casual(rng, question.format(c=country)), f"The capital of {country} is {city}.")
    if rng.random() < 0.3:
        asked = country if rng.random() < 0.5 else pick(rng, list(CAPITALS))
        question = pick(rng, ["Is {c} in {l}?", "Is {c} the capital of {l}?",
                              "{c} is the capital of {l}, right?", "{c} is in {l}, right?"])
        answer = f"{'Yes' if asked == country else 'No'}, {city} is the capital of {country}."
        return ask(casual(rng, question.format(c=city, l=asked)), answer)
    question = pick(rng, ["Which country is {c} in?", "Where is {c}?", "In which country is {c}?",
                          "{c} is the capital of which country?"])
    return ask(casual(rng, question.format(c=city)), f"{city} is the capital of {country}.")


KINDS = {
    "fruits": FRUITS, "colors": COLORS, "animals": list(ANIMALS), "jobs": JOBS, "names": NAMES,
    "countries": list(CAPITALS)[:30],
}


def relation(rng: random.Random) -> Messages:
    """Ask for an opposite, an animal's sound, a mixed color, or a few of a kind."""
    kind = rng.randrange(5)
    if kind < 2:
        index = rng.randrange(len(OPPOSITES))
        word, other = OPPOSITES[index], OPPOSITES[index ^ 1]
        question = pick(rng, ["What is the opposite of {w}?", "The opposite of {w}?",
                              "Opposite of {w}?", "Give me the opposite of {w}.", "Opposite of {w}",
                              "What's the opposite of {w}?", "Tell me the opposite of {w}."])
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
    name, pool = pick(rng, list(KINDS.items()))
    count = rng.randint(2, 7)
    question = pick(rng, ["Name {n} {k}.", "List {n} {k}.", "Give me {n} {k}.", "Tell me {n} {k}.",
                          "Can you name {n} {k}?"])
    # Always the same items, so that a greedy answer is a sure one.
    return ask(casual(rng, question.format(n=count, k=name)), ", ".join(pool[:count]))


def language(rng: random.Random) -> Messages:
    """Ask for a greeting or thanks in another language."""
    name, forms, table = pick(rng, [
        ("hello", ["Say hello in {l}.", "How do you say hello in {l}?", "Hello in {l}?",
                   "Greet me in {l}.", "What is hello in {l}?", "How to say hello in {l}?",
                   'How do you say "hello" in {l}?', "What is hello in {l}?",
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
