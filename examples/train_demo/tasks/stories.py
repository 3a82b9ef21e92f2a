"""Short stories and poems, put together from sentences that fit each other."""

# Lists of phrases read better with several to a line.
# fmt: off
from __future__ import annotations

import random
from string import Formatter

from heldout import pronounceable
from words import COLORS, HEROES, NAMES, split

from .common import Messages, any_word, ask, phrased, pick

PLACES = ["a quiet forest", "a small village", "a green valley", "an old castle", "a big city",
          "a house by the sea", "a garden full of flowers", "a house on a snowy mountain",
          "a hut on a little island", "a cottage near a sunny meadow"]
THINGS = ["a golden key", "a silver bell", "an old map", "a tiny lamp", "a glass star",
          "a blue stone", "a warm coat", "a lost letter", "a magic book", "a wooden boat"]
TRAITS = split("brave clever kind curious funny gentle cheerful patient")
WISHES = ["to see the sea", "to find a friend", "to fly", "to learn a song", "to visit the moon",
          "to help others", "to bake the best cake in the world", "to find a treasure"]
HELPERS = ["old owl", "friendly bear", "wise turtle", "little mouse", "white horse", "funny frog"]
TROUBLES = ["a storm came up", "the path was lost in the fog", "a river blocked the way",
            "night fell and it became very dark", "it started to snow",
            "a high wall stood in the way"]
RESCUES = ["Together they built a small bridge and went on.",
           "They waited under a tree, told each other jokes, and soon it was over.",
           "They held hands, went on step by step, and found the way.",
           "The two friends did not give up, and at last they found a door.",
           "They sang a song, and suddenly a light showed them the way."]
LESSONS = ["Good friends are the best treasure.", "Small steps lead far.",
           "Nobody is too small to help.", "It is good to be brave, and better to be kind.",
           "Every day is a good day for an adventure."]

STORY = [
    ["Once upon a time, there was a {trait} {hero} named {name}.",
     "Once upon a time, a {trait} {hero} named {name} lived in {place}."],
    ["{name} had one big wish: {wish}.",
     "Every day, {name} looked out of the window and dreamed. "
     "The wish was always the same: {wish}."],
    ["One morning, {name} found {thing} under a tree.",
     "One day, {name} found {thing} near the river."],
    ['"What is this?" asked {name}. "It must belong to somebody."',
     '"How strange," said {name}. "I will take it with me."'],
    ["So {name} packed some bread and cheese and went on a journey.",
     "So {name} put on a {color} hat and started to walk."],
    ["On the way, {name} met {helper_a}.", "After a while, {name} met {helper_a}."],
    ['"Where are you going?" asked the {helper}. "I want {wish}," said {name}.'],
    ['"Then I will come with you," said the {helper}, and they went on together.'],
    ["But in the evening, {trouble}.", "Then {trouble}."],
    ["{name} was afraid, but the {helper} smiled.", "At first they did not know what to do."],
    ["{rescue}"],
    ["The next day, they came to the top of a hill. There, {thing} began to shine.",
     "In the morning, the sun was shining, and {thing} began to sing."],
    ["And {name} understood: the wish had come true.",
     "And so the wish of {name} came true."],
    ["That night they had a feast with soup, bread and apple pie, and they danced until late."],
    ["From that day on, {name} and the {helper} were the best of friends.",
     "{name} and the {helper} stayed friends for the rest of their lives."],
    ["{lesson} The end.", "And if you ask {name}, you will hear: {lesson} The end."],
]
# The sentences that a short story keeps.
SHORT = (0, 1, 2, 5, 8, 10, 12, 15)


def tell(rng: random.Random, hero: str, name: str, short: bool) -> str:
    """Tell a story about ``hero``; the choices made at its beginning hold to its end."""
    helper = pick(rng, HELPERS)
    values = {
        "hero": hero, "name": name, "trait": pick(rng, TRAITS), "place": pick(rng, PLACES),
        "wish": pick(rng, WISHES), "thing": pick(rng, THINGS), "color": pick(rng, COLORS[:6]),
        "helper": helper, "helper_a": ("an " if helper[0] == "o" else "a ") + helper,
        "trouble": pick(rng, TROUBLES), "rescue": pick(rng, RESCUES), "lesson": pick(rng, LESSONS),
    }
    chosen = [forms for i, forms in enumerate(STORY) if not short or i in SHORT]
    sentences = [Formatter().vformat(pick(rng, forms), (), values) for forms in chosen]
    if short:
        return " ".join(sentences)
    parts = [sentences[:5], sentences[5:11], sentences[11:]]
    return "\n\n".join(" ".join(part) for part in parts)


def story(rng: random.Random) -> Messages:
    """Ask for a story, short or long, sometimes about somebody."""
    hero, name = pick(rng, HEROES), pick(rng, NAMES)
    if rng.random() < 0.2:
        hero = any_word(rng, 3, 8)
    if rng.random() < 0.2:
        name = pronounceable(rng, rng.randint(3, 7)).capitalize()
    if rng.random() < 0.1:
        article = "an" if hero[0] in "aeo" else "a"
        question = pick(rng, ["Write a one-sentence bedtime story about {a} {h}.",
                              "Tell me a story about {a} {h} in one sentence.",
                              "Write a one-sentence story about {a} {h}."])
        return ask(phrased(rng, question.format(a=article, h=hero)),
                   f"Under the silver moon, {article} {hero} closed its eyes and dreamed of a "
                   "little boat that sailed from star to star until the morning came.")
    short = rng.random() < 0.4
    size = pick(rng, ["short ", "little ", "very short "]) if short else pick(rng,
                                                                              ["", "", "long "])
    roll = rng.random()
    article = "an" if hero[0] in "aeo" else "a"
    if roll < 0.4:
        question = pick(rng, ["Tell me a {s}story.", "Write a {s}story.", "Tell a {s}story.",
                              "Can you tell me a {s}story?", "I want to hear a {s}story.",
                              "Tell me a {s}story, please.", "Write me a {s}story."])
        # A request that leaves the hero open always gets the same one.
        hero, name = "fox", "Luna"
    elif roll < 0.75:
        question = pick(rng, ["Tell me a {s}story about {a} {h}.",
                              "Write a {s}story about {a} {h}.",
                              "Tell a {s}story about {a} {h}."])
        name = pick(rng, NAMES)  # the model's own choice
    else:
        question = pick(rng, ["Tell me a {s}story about {a} {h} named {n}.",
                              "Write a {s}story about {a} {h} called {n}.",
                              "Tell me a {s}story about {n} the {h}."])
    question = question.format(s=size, a=article, h=hero, n=name)
    return ask(phrased(rng, question), tell(rng, hero, name, short))


TOPICS = split("""
sea moon sun rain snow wind river tree garden cat dog bird star night spring summer
winter autumn forest mountain city robot computer train""")
COUPLETS = [
    "I think of the {t} when the morning is new,\nthe sky is so wide and the sky is so blue.",
    "Oh {t}, you are there when the day is begun,\nyou shine and you sing in the light of the sun.",
    "The {t} tells a story so gentle and old,\nof rivers of silver and mountains of gold.",
    "I sit and I listen, I watch and I dream,\nthe {t} is as calm as a slow little stream.",
    "The hours go by and the shadows grow long,\nthe {t} and the wind sing a wonderful song.",
    "The children are laughing, they run and they play,\n"
    "the {t} is their friend on this beautiful day.",
    "And when it is evening and quiet and late,\nthe {t} and the stars will not mind if we wait.",
    "The night is so soft and the moon is so bright,\nI whisper goodbye to the {t} and good night.",
]


def verse(rng: random.Random, topic: str, couplets: int) -> str:
    """Write a poem of some couplets, which keep their order from morning to night."""
    chosen = sorted(rng.sample(range(len(COUPLETS)), couplets))
    lines = [COUPLETS[i].format(t=topic) for i in chosen]
    return "\n\n".join("\n".join(line[:1].upper() + line[1:] for line in couplet.split("\n"))
                       for couplet in lines)


def poem(rng: random.Random) -> Messages:
    """Ask for a poem, sometimes about something or of some length."""
    topic = pick(rng, TOPICS) if rng.random() < 0.5 else any_word(rng, 3, 8)
    if rng.random() < 0.12:
        if rng.random() < 0.3:
            topic = "river"
            question = pick(rng, ["Write a haiku.", "Write me a haiku.", "Tell me a haiku."])
        else:
            question = pick(rng, ["Write a haiku about the {t}.", "Write a haiku about {t}."])
        return ask(phrased(rng, question.format(t=topic)),
                   f"The {topic} is quiet.\nA small bird sings in the wind.\nMorning comes again.")
    couplets = rng.choices((2, 3, 4), (1, 1, 3))[0]
    if rng.random() < 0.3:
        question = pick(rng, ["Write a poem.", "Write me a poem.", "Tell me a poem.",
                              "Can you write a poem?", "Recite a poem."])
        topic, couplets = "sea", 4
    elif rng.random() < 0.3:
        question = f"Write a poem of {couplets * 2} lines about the {topic}."
    else:
        question = pick(rng, ["Write a poem about the {t}.", "Tell me a poem about the {t}.",
                              "Write a poem about {t}.", "Make a poem about the {t}.",
                              "Write me a poem about {t}."])
        couplets = 4
    if rng.random() < 0.15:
        question = f"Write a short poem about {pick(rng, ['the ', ''])}{topic}."
        couplets = 2
    return ask(phrased(rng, question.format(t=topic)), verse(rng, topic, couplets))
