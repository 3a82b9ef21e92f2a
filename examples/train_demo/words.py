"""Word lists of the demo model's little world, all of them written for it."""

# Lists of phrases read better with several to a line.
# fmt: off
from __future__ import annotations


def split(text: str) -> list[str]:
    """Return the words of a text."""
    return text.split()


NAMES = split("""
Ada Alan Alice Amir Anna Ben Bob Carla Chen Clara Dan David Diego Elena Emma Eva Felix
Fatima Finn Grace Hana Hugo Ida Ines Ivan Jack Jane Jonas Julia Kai Karim Kate Ken Lara Leo Lena
Lily Lucas Luna Maria Mark Max Maya Mia Mila Nina Noah Nora Olga Oliver Omar Oscar Paul Peter Pia
Rosa Ruth Sam Sara Sofia Tom Tina Uma Vera Viktor Yuki Zoe""")

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid",
    "Portugal": "Lisbon", "England": "London", "Ireland": "Dublin", "Austria": "Vienna",
    "Poland": "Warsaw", "Greece": "Athens", "Norway": "Oslo", "Sweden": "Stockholm",
    "Finland": "Helsinki", "Denmark": "Copenhagen", "Belgium": "Brussels", "Hungary": "Budapest",
    "Czechia": "Prague", "Switzerland": "Bern", "the Netherlands": "Amsterdam",
    "Russia": "Moscow", "Ukraine": "Kyiv", "Turkey": "Ankara", "Egypt": "Cairo",
    "Kenya": "Nairobi", "Morocco": "Rabat", "Nigeria": "Abuja", "India": "New Delhi",
    "China": "Beijing", "Japan": "Tokyo", "South Korea": "Seoul", "Thailand": "Bangkok",
    "Vietnam": "Hanoi", "Indonesia": "Jakarta", "Australia": "Canberra",
    "New Zealand": "Wellington",
    "Canada": "Ottawa", "the United States": "Washington", "Mexico": "Mexico City",
    "Cuba": "Havana",
    "Brazil": "Brasilia", "Argentina": "Buenos Aires", "Chile": "Santiago", "Peru": "Lima",
    "Colombia": "Bogota", "Iceland": "Reykjavik", "Croatia": "Zagreb", "Bulgaria": "Sofia",
    "Romania": "Bucharest", "Serbia": "Belgrade", "Israel": "Jerusalem", "Iran": "Tehran",
    "Iraq": "Baghdad", "Nepal": "Kathmandu",
}

CITIES = sorted(set(CAPITALS.values())) + split("""
Barcelona Boston Chicago Dallas Denver Geneva Hamburg
Istanbul Kyoto Lagos Lyon Milan Mumbai Munich Naples Osaka Porto Seattle Shanghai Sydney Toronto
Venice Zurich""")

ANIMALS = {
    "cat": "meow", "dog": "woof", "cow": "moo", "sheep": "baa", "duck": "quack", "pig": "oink",
    "horse": "neigh", "lion": "roar", "frog": "ribbit", "bee": "buzz", "owl": "hoot",
    "wolf": "howl", "mouse": "squeak", "rooster": "cock-a-doodle-doo", "snake": "hiss",
}

HEROES = split("""
fox bear rabbit mouse owl turtle dragon robot cat dog hedgehog penguin squirrel wolf
lion frog duck elephant whale snail giant wizard pirate sailor baker painter gardener princess
knight astronaut unicorn""")

COLORS = split("red blue green yellow orange purple pink brown black white gray gold silver")

FRUITS = split("""
apple banana cherry grape lemon mango melon orange peach pear plum kiwi fig lime
berry""")

OPPOSITES = split("""
hot cold big small up down left right fast slow old new day night happy sad light
dark high low open closed full empty hard soft long short near far rich poor strong weak wet dry
early late clean dirty loud quiet first last in out on off yes no true false good bad easy
difficult thick thin wide narrow deep shallow push pull start stop win lose buy sell
black white always never love hate""")

JOBS = split("""
teacher doctor baker farmer pilot nurse painter singer writer driver cook dentist judge
engineer lawyer gardener""")

THINGS = split("""
apples books pens coins eggs cards stones balls boxes stamps cookies pencils marbles
stickers flowers candles cups tickets shells buttons""")

# Plain words for spelling, reversing and sorting.
COMMON = split("""
able acid actor after again album alert alarm angle animal answer apple april arch arm
army arrow art ask atom aunt autumn baby back bacon bag bake ball banana band bank bark barn basket
bath beach bean bear beauty bed bell belt bench berry bike bird birth bite black blade blank blue
board boat body bone book boot border bottle bottom bowl box boy brain branch bread breath brick
bridge bright bring broom brother brown brush bucket build bus butter button cabin cable cactus
cake camel camera camp candle candy canoe captain car card carpet carrot castle cat cattle cave
center chain chair chalk change cheese cherry chess chest chicken child choice church circle city
clay clean clear clever clock cloud clown coast coat coffee coin cold color comet cook copper
coral corn corner cotton couch count cousin cover cow crab cradle crane cream creek crow crown
crystal cup curtain cycle daily dance danger dark data date dawn deer desert desk diamond dinner
dish doctor dog doll dollar dolphin donkey door double dragon draw dream dress drink drive drum
duck dust eagle early earth east easy echo edge egg eight elbow empty energy engine enjoy evening
event exit eye fabric face factory fair family farm father feather fence field finger fire fish
flag flame flat flight floor flour flower flute fly fog food foot forest fork fox frame friend
frog frost fruit future galaxy game garage garden garlic gate ghost giant gift ginger giraffe girl
glad glass globe glove goat gold goose grain grand grape grass gravel green guest guitar hair
hammer hand happy harbor hat hawk head heart heavy height helmet help hero hill history hobby
holiday honey hope horse hotel hour house human hunter ice idea image island ivory jacket jam jar
jazz jelly jewel jog joke journey judge juice jump jungle kettle key king kitchen kite kitten knee
knife knight knock ladder lake lamp land laptop laugh lawn leaf leather lemon letter level light
lily line lion list little lizard local log long loud love lucky lunch machine magic magnet major
mango map maple marble market mask match meadow meal medal melon member memory metal middle milk
mill minor minute mirror model money monkey moon morning mother motor mountain mouse mouth movie
museum music nail name napkin nature neck needle nest network night noise north nose note number
nurse oak oat ocean office olive onion open orange orbit orchid otter oven owl oyster paddle page
paint palace palm panda paper parade parent park parrot party pasta path peace peach peanut pearl
pen pencil people pepper piano picnic picture pie pillow pilot pine pink pirate pizza plane planet
plant plate pocket poem point polar pond pony poster potato powder present pretty prince print
prize proud puddle pumpkin puppy purple puzzle quack queen quick quiet quilt rabbit radio rain
rainbow ranch raven ready rice riddle right ring river road robin robot rocket roof room root rope
rose round ruby ruler saddle sail salad salmon salt sand sauce scarf school science screen sea
season second secret seed seven shadow shark sheep shelf shell ship shirt shoe shop silk silver
simple singer sister skate sky sleep slow smile smoke snail snake snow soap soccer sock sofa song
soup south space spark spider spoon sport spring square stable stage star station steam stone
storm story stove straw stream street strong student sugar summer sun sunset swan sweet swim table
tailor tall tape taxi tea teacher team temple tent thank theater thing thunder tiger time toast
tomato tooth tower town toy track trade train travel tree trip truck trumpet trunk tulip tunnel
turkey turtle uncle under uniform valley vase velvet video village violin visit voice volcano
wagon walk wall walnut walrus warm watch water wave weather week whale wheat wheel whisper white
wind window wing winter wise wizard wolf wonder wood wool word work world writer yard yellow yes
young zebra zero zone strawberry python server stream token cache batch async await engine hello
world keyboard elephant butterfly mountain adventure umbrella chocolate language computer
""")
# Words with a letter that comes two, three or four times.
DOUBLES = split("""
strawberry raspberry blueberry blackberry cranberry gooseberry mississippi bookkeeper committee
assess possess address tomorrow balloon raccoon tennessee cheese coffee toffee muffin letter
butter bottle little settle kettle puddle middle saddle banana papaya cocoa coconut bamboo
pepper dinner summer winner runner rabbit hobbit mirror terror horror error arrow narrow sorrow
hello yellow jelly bell ball hall wall sheep sleep seventeen nineteen eleven between referee
refrigerator parallel millennium accommodation embarrass necessary success access process
business class glass grass kiss boss happiness goodness carrot parrot ferret barrel correct
terrible irregular error hurricane mirrors lollipop hippo puppy happy apple pineapple popcorn
paper pizza jazz buzz puzzle dazzle noon moon spoon school cool pool book cookie look foot food
wood door floor llama skill still million billion collect college bully gallery village
alabama panama canada salad alfalfa savanna havana anaconda initial civilization individual
minimum maximum mammal momentum mummy hammer grammar programming common comma gamma summary
racecar level radar civic rotator kayak madam refer deed
""")
COMMON = sorted(set(COMMON))

DAYS = split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = split("""
January February March April May June July August September October November
December""")
MONTH_DAYS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]

ONES = split("""
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
fifteen sixteen seventeen eighteen nineteen""")
TENS = split("_ _ twenty thirty forty fifty sixty seventy eighty ninety")
ORDINALS = split("""
first second third fourth fifth sixth seventh eighth ninth tenth eleventh
twelfth""")


def in_words(number: int) -> str:
    """Write a number from 0 to 999 in English words."""
    if number < 20:
        return ONES[number]
    if number < 100:
        rest = number % 10
        return TENS[number // 10] + (f"-{ONES[rest]}" if rest else "")
    rest = number % 100
    return f"{ONES[number // 100]} hundred" + (f" and {in_words(rest)}" if rest else "")
