"""The bundled prompts: word problems and requests of our own wording, put together by a seeded program.

They cover what small instruction models are asked: arithmetic told as a story, writing, explaining, planning, code.
Variety matters more than sense here, because the answers, whatever they are, come from the target.
"""

import random
from collections.abc import Iterator


def _listed(text: str) -> list[str]:
    return text.split(",")


_NAMES = [
    "Ava",
    "Bruno",
    "Carla",
    "Dmitri",
    "Elif",
    "Farid",
    "Greta",
    "Hiro",
    "Ines",
    "Jamal",
    "Keiko",
    "Luca",
    "Mira",
    "Nadia",
    "Omar",
    "Priya",
    "Quentin",
    "Rosa",
    "Samir",
    "Tessa",
    "Uma",
    "Viktor",
    "Wanda",
    "Xavier",
    "Yara",
    "Zane",
    "Anika",
    "Boris",
    "Celeste",
    "Diego",
    "Esther",
    "Felix",
    "Gloria",
    "Hassan",
    "Irina",
    "Jonas",
    "Kofi",
    "Lena",
]
_THINGS = [
    "pencils",
    "apples",
    "stickers",
    "marbles",
    "books",
    "cookies",
    "eggs",
    "tickets",
    "buttons",
    "shells",
    "plates",
    "candles",
    "roses",
    "bricks",
    "coins",
    "bottles",
    "cards",
    "muffins",
    "oranges",
    "badges",
    "lamps",
    "chairs",
    "ribbons",
    "batteries",
    "envelopes",
    "cups",
    "postcards",
    "tomatoes",
    "balloons",
    "keys",
    "notebooks",
    "scarves",
    "tiles",
    "jars",
    "puzzles",
    "magnets",
    "loaves of bread",
    "bags of rice",
    "tins of paint",
    "boxes of tea",
]
_PLACES = [
    "a farm",
    "a bakery",
    "a school",
    "a library",
    "a toy shop",
    "a bus station",
    "a market stall",
    "a bookshop",
    "a summer camp",
    "a museum",
    "a garden",
    "a workshop",
    "a hotel",
    "a restaurant",
    "a factory",
    "a swimming pool",
    "a cinema",
    "a hospital",
    "a harbor",
    "a sports club",
]
_JOBS = [
    "baker",
    "teacher",
    "driver",
    "painter",
    "gardener",
    "nurse",
    "farmer",
    "tailor",
    "plumber",
    "clerk",
    "waiter",
    "mechanic",
    "barber",
    "fisher",
]
_DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]

_PROBLEMS = (
    "{name} has {a} {thing}. {other} gives {name} {b} more, and then {name} loses {small}."
    " How many {thing} does {name} have now?",
    "{name} buys {small} boxes of {thing}. Each box holds {a} {thing} and costs ${c}. How much does {name} pay, and how"
    " many {thing} are there in all?",
    "At {place} there are {b} {thing}. On {day} a third of {triple} new {thing} arrive and {a} are sold."
    " How many {thing} are left at the end of the day?",
    "A {job} earns ${c} an hour and works {small} hours a day, {days} days a week. How much does the {job} earn in"
    " {few} weeks?",
    "{name} reads {a} pages on {day} and twice as many the day after. If the book has {big} pages, how many pages are"
    " left to read?",
    "A train travels at {speed} miles per hour for {few} hours and then at {a} miles per hour for {small} hours. How"
    " far does it go altogether?",
    "{name} is {small} years older than {other}. In {few} years the sum of their ages will be {big}. How old is {name}"
    " today?",
    "{name} bakes {dozen} {thing} and shares them equally among {few} friends. Each friend eats {few} of them."
    " How many {thing} remain?",
    "{place_cap} sells tickets for ${c} each. On {day} {a} people come, and on the next day {b} people come. Children,"
    " who are half of all visitors, pay half the price. How much money is made in the two days?",
    "A tank holds {big} liters of water. It loses {small} liters every hour and is refilled with {c} liters every"
    " {few} hours. How much water is in it after {dozen} hours?",
    "{name} saves ${c} every week. A bicycle costs ${big}. After {few} weeks {name}'s aunt adds ${b}. How many more"
    " weeks must {name} save?",
    "The price of a coat is ${big}. {place_cap} takes {percent}% off, and {name} also has a coupon for ${small}. What"
    " does {name} pay?",
    "There are {a} red {thing}, twice as many blue ones, and {small} fewer green ones than blue ones. How many {thing}"
    " are there in total?",
    "{name} and {other} pick {big} {thing} together. {name} picks {few} times as many as {other}. How many does each of"
    " them pick?",
    "A recipe for {few} people needs {small} cups of flour. {name} cooks for {dozen} people. How many cups of flour are"
    " needed, and how many are left from a bag of {b} cups?",
    "{name} runs {few} miles every {day} and {small} miles on each of {days} other days. How many miles is that in"
    " {few} weeks?",
    "In a class of {a} students, {percent}% play an instrument and {small} of those play the piano. How many play an"
    " instrument other than the piano?",
    "{name} sells {thing} for ${few} each. Making one costs $1, and the stall costs ${c} a day. How much profit does"
    " {name} make with {b} {thing} in one day?",
    "{name} walks from home to {place} in {b} minutes, stays there for {few} hours and takes {small} minutes longer to"
    " walk back. How many minutes is {name} away?",
    "A rope of {big} feet is cut into {few} equal pieces and one piece is cut again into pieces of {small} feet. How"
    " many short pieces are there?",
    "Each of {few} shelves at {place} holds {a} {thing}. {name} removes {small} from every shelf and puts {b} new ones"
    " on the first. How many {thing} are on the shelves now?",
    "{name} weighs {a} pounds more than {other}, who weighs {b} pounds. Their dog weighs a {fraction} of what {name}"
    " weighs. How much do all three weigh together?",
    "If {few} {job}s finish a house in {dozen} days, how many days do {small} {job}s need for the same work?",
    "{name} has ${big}. {name} spends a {fraction} of it on {thing} and ${small} on lunch. How much money is left?",
)
_TOPICS = [
    "the water cycle",
    "black holes",
    "honeybees",
    "the Roman Empire",
    "photosynthesis",
    "volcanoes",
    "jazz",
    "chess",
    "electric cars",
    "coral reefs",
    "the moon",
    "vaccines",
    "glaciers",
    "democracy",
    "inflation",
    "gravity",
    "whales",
    "coffee",
    "bread",
    "bicycles",
    "libraries",
    "sleep",
    "earthquakes",
    "rainforests",
    "the printing press",
    "compound interest",
    "magnets",
    "the heart",
    "dreams",
    "tides",
    "robots",
    "recycling",
    "solar panels",
    "ancient Egypt",
    "the Silk Road",
    "penguins",
    "meditation",
    "soccer",
    "opera",
    "poetry",
    "time zones",
    "supply and demand",
    "the periodic table",
    "DNA",
    "bridges",
    "maps",
    "money",
    "rainbows",
    "spiders",
    "friendship",
    "teamwork",
    "stress",
    "public speaking",
    "gardening",
    "hiking",
    "cooking for one",
    "learning a language",
    "saving money",
    "job interviews",
    "online privacy",
    "machine learning",
    "databases",
    "the internet",
    "open source software",
    "a healthy breakfast",
    "remote work",
    "raising a puppy",
    "travel by train",
    "city parks",
    "climate change",
    "the Renaissance",
    "the human eye",
    "wind power",
    "plastic waste",
    "music theory",
    "photography",
    "origami",
    "tea",
    "the ocean floor",
    "dinosaurs",
    "the speed of light",
    "antibiotics",
    "the stock market",
    "fairy tales",
    "architecture",
    "algebra",
    "probability",
    "fractions",
    "triangles",
    "prime numbers",
    "sorting algorithms",
    "recursion",
    "version control",
    "unit tests",
]
_REQUESTS = (
    "Explain {topic} to a {age}-year-old.",
    "Write a short story about {name} and {topic}.",
    "What are the main advantages and disadvantages of {topic}?",
    "Give me {few} tips about {topic}.",
    "Write a poem about {topic}.",
    "Describe {topic} in {small} sentences.",
    "Write an email to {name} that invites them to a talk about {topic}.",
    "Why is {topic} important?",
    "What is the history of {topic}?",
    "Compare {topic} and {topic2}.",
    "Make a list of {small} facts about {topic}.",
    "Write a blog post about {topic} for beginners.",
    "I have to give a talk about {topic} at {place}. Draft an outline.",
    "Act as a {job} who knows a lot about {topic}. What would you tell a visitor?",
    "What would happen if {topic} did not exist?",
    "Write a dialogue between {name} and {other} about {topic}.",
    "Summarize what everyone should know about {topic}.",
    "How can I learn more about {topic} in {few} weeks? Plan it for me.",
    "Suggest a title and an opening paragraph for an article on {topic}.",
    "Write {few} quiz questions about {topic} with answers.",
    "What are common mistakes people make with {topic}?",
    "Is {topic} good or bad for society? Argue both sides.",
    "Rewrite this sentence in a friendlier tone: We do not discuss {topic} at {place}.",
    "Correct the grammar: {name} don't knows nothing about {topic}, but she like it.",
    "Extract the names and numbers from this text: On {day}, {name} and {other} sold {a} {thing} at {place} for ${b}.",
    "Classify this review as positive or negative: The evening about {topic} at {place} was the best in {few} years.",
    "Write a product description of {thing} made for people who love {topic}.",
    "Imagine you are {name}, a {job}. Describe your day at {place}.",
    "Write a letter of complaint to {place} about {thing}.",
    "Plan a trip of {few} days for someone interested in {topic}.",
    "Write a Python function that {task}.",
    "Write a {language} program that {task}, and explain how it works.",
    "What does this mean in programming: {task}? Show an example in {language}.",
    "How do I write a function that {task} without using any library?",
    "Solve for x: {few}x + {small} = {a}.",
    "What is {a} times {small}, plus {b}? Show the steps.",
    "What is {percent}% of {big}?",
    "The sides of a rectangle are {a} and {small}. What are its area and its perimeter?",
    "A die is thrown {few} times. What is the probability that every throw shows a six?",
    "Who was involved in {topic}, and when did it start?",
    "Translate into French: {name} has {a} {thing}.",
    "What is the difference between a {job} and a {job2}?",
    "Name {few} books or films about {topic} and say why they are worth it.",
    "Give step-by-step instructions for starting with {topic}.",
)
_TASKS = [
    "reverses a string",
    "counts the vowels in a text",
    "finds the largest number in a list",
    "checks whether a number is prime",
    "sorts a list of names",
    "removes duplicates from a list",
    "adds two numbers",
    "computes a factorial",
    "merges two dictionaries",
    "reads a file line by line",
    "counts words",
    "finds the second smallest number",
    "checks for a palindrome",
    "converts Celsius to Fahrenheit",
    "returns the Fibonacci numbers up to n",
    "flattens a nested list",
    "computes an average",
    "finds common elements of two lists",
    "rotates a list by k places",
    "validates an email address",
    "counts how often each letter occurs",
    "generates a random password",
    "computes the sum of the digits of a number",
    "finds the longest word",
    "splits a list into chunks",
    "transposes a matrix",
    "searches a sorted list",
    "prints a multiplication table",
    "checks whether two strings are anagrams",
    "converts a decimal number to binary",
]
_LANGUAGES = ["Python", "JavaScript", "Java", "C", "Go", "Ruby"]
_FRACTIONS = ["half", "third", "quarter", "fifth"]

# How a user's turn may begin that the target then goes on writing. Empty: the target begins it too.
_PROBLEM_OPENINGS = (
    "{name} has",
    "{name} went to {place} and bought {a}",
    "{name} and {other} are",
    "A {job} has {big}",
    "There are {a} {thing} at {place}.",
    "In {place}, there are",
    "On {day}, {name} sold {a} {thing}",
    "{name} is {a} years old.",
    "If {name} drives",
    "A store sells",
    "It takes {few}",
    "The cost of",
    "Each {thing_one}",
    "{name} earns ${c}",
    "A class of {a} students",
    "{name} wants to",
)
_OPENINGS = (
    "",
    "",
    "Write a",
    "Write an email",
    "Write a story about {topic}",
    "Write a Python function",
    "Explain",
    "Explain how {topic}",
    "How",
    "How do I",
    "How many",
    "What is",
    "What are the",
    "Why",
    "Describe",
    "Compare",
    "Give me",
    "Can you",
    "I want",
    "I need help with",
    "Imagine",
    "Summarize",
    "Create a",
    "Design",
    "List",
    "Suggest",
    "Calculate",
    "Solve",
    "Find the",
    "Let",
    "Please",
    "Translate",
    "Given the following",
    "Pretend to be",
    "You are a {job}.",
)


def word_problems(seed: int) -> Iterator[str]:
    """Endless arithmetic told as stories."""
    return _fill(_PROBLEMS, f"problems/{seed}")


def requests(seed: int) -> Iterator[str]:
    """Endless requests of other kinds: writing, explaining, code, extraction, small sums."""
    return _fill(_REQUESTS, f"requests/{seed}")


def openings(seed: int) -> Iterator[str]:
    """Endless beginnings of a user's turn, for the target to complete."""
    return _fill(2 * _PROBLEM_OPENINGS + _OPENINGS, f"openings/{seed}")


def _fill(templates: tuple[str, ...], seed: str) -> Iterator[str]:
    generator = random.Random(seed)
    while True:
        yield generator.choice(templates).format_map(_Words(generator))


class _Words(dict[str, object]):
    """The words of one text: each drawn when its template first asks for it, and the same from then on."""

    def __init__(self, generator: random.Random) -> None:
        super().__init__()
        self._generator = generator

    def __missing__(self, key: str) -> object:
        self[key] = value = self._draw(key)
        return value

    def _draw(self, key: str) -> object:
        pick, between = self._generator.choice, self._generator.randint
        match key:
            case "name":
                return pick(_NAMES)
            case "other":
                return pick([name for name in _NAMES if name != self.get("name")])
            case "thing":
                return pick(_THINGS)
            case "thing_one":
                return pick(_THINGS).removesuffix("s")
            case "place":
                return pick(_PLACES)
            case "place_cap":
                return pick(_PLACES).capitalize()
            case "job" | "job2":
                return pick(_JOBS)
            case "day":
                return pick(_DAYS)
            case "topic" | "topic2":
                return pick(_TOPICS)
            case "task":
                return pick(_TASKS)
            case "language":
                return pick(_LANGUAGES)
            case "fraction":
                return pick(_FRACTIONS)
            case "few":
                return between(2, 6)
            case "small":
                return between(2, 12)
            case "days":
                return between(3, 6)
            case "age":
                return between(6, 16)
            case "a":
                return between(12, 60)
            case "b":
                return between(20, 150)
            case "c":
                return between(5, 40)
            case "big":
                return between(100, 900)
            case "speed":
                return 5 * between(6, 16)
            case "dozen":
                return 12 * between(1, 5)
            case "triple":
                return 3 * between(5, 40)
            case "percent":
                return 5 * between(1, 12)
        raise KeyError(key)
