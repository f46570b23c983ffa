"""Sorting the chats of the corpus into classes, and deriving short definition chats from prose.

Classes (their shares are set in pack.py): math, med, dialogue, extract, codeqa, exercise, tpl (cut
from documentation by templates), api (the same for API reference pages), qa (everything else:
textbook questions, glossaries, FAQs, interviews, reading)."""
import random
import re

TURN = re.compile(r"<start_of_turn>(user|model)\n(.*?)<end_of_turn>", re.S)
CODEQA = re.compile(
    r"(Summarise what th|What does (this|the following) \w+ (code|function|method)|Add "
    r"documentation|Explain the following|"
    r"Write (the|a|an) \S+ (function|method)|Implement an? \w+|In (Python|Rust|Java|Go|C|C\+\+|"
    r"Kotlin|Ruby|JavaScript|"
    r"TypeScript), )")
EXERCISE = re.compile(
    r"(Solve this exercise|Write an? \S+ solution|For the exercise|How can I solve|Show me how)"
)
API = re.compile(
    r"(in Windows( drivers)?|\((Excel|Word|PowerPoint|Access|Outlook|Visio|Project|Publisher|"
    r"Office|VBA|C\+\+)\)|in C\+\+|"
    r"(method|property|object|event|function|structure|enumeration|interface|routine|macro|"
    r"callback)( in \w+)?|"
    r"Compiler (Error|Warning).*|for me|section of the .*)[.?]?$")
TPL = re.compile(
    r"(Can you explain|Tell me about|Give me|Describe |Explain |Document |How do I (use|include)|"
    r"Can you give|"
    r"What (is|are) .*\((in the context|C\+\+)|What should I)")
MED = re.compile(
    r"(What (is|are) \(?are\)? |What causes |Who is at risk |What (is|are) the (symptoms|"
    r"treatments|genetic changes|outlook|"
    r"complications|stages|genes)|How (to (diagnose|prevent)|many people are affected by)|Is .* "
    r"inherited|"
    r"what research|Do you have information about|How can .* be (treated|prevented))", re.I)


def classify(text):
    turns = TURN.findall(text)
    if len(turns) < 2 or turns[0][0] != "user":
        return "tpl"
    user, model = turns[0][1], turns[1][1]
    if re.search(r"The answer is -?[\d.,]+$", model):
        return "math"
    if len(turns) >= 4 and "```" not in text and all(
        len(t) < 320 for _, t in turns
    ) and len(text) / len(turns) < 170:
        return "dialogue" if not re.match(
            r"(What is|Define|What does|Find|Simplify|Solve)", user
        ) else "qa"
    if CODEQA.match(user):
        return "codeqa"
    if EXERCISE.match(user) or "exercism" in user.lower():
        return "exercise"
    if len(user) > 350 and len(model) < 120:
        return "extract"
    if API.search(user.split("\n")[0]) or "## Requirements" in model or "\nHeader" in model:
        return "api"
    if MED.match(user):
        return "med"
    if TPL.match(user):
        return "tpl"
    return "qa"


def clean(cls, text):
    """True if a chat is good enough to be imitated in the decay phase."""
    turns = TURN.findall(text)
    model = "\n".join(t for who, t in turns if who == "model")
    if len(turns) < 2 or len(text) > 7000 or len(model) < 2 or model.startswith(
        ("---", "|", ":::")
    ):
        return False
    if model.count("|") > 12 or "NAME\n" in model[:20]:
        return False
    if cls == "tpl" and (len(model) > 2200 or "`" in turns[0][1] or len(turns[0][1]) > 90):
        return False
    if cls == "med" and ("Human Phenotype Ontology" in model or len(model) > 2500):
        return False
    if cls == "codeqa" and len(text) > 2200:
        return False
    return cls != "api"


DEFINITION = re.compile(
    r"^(?P<det>The |An? )?\*{0,2}(?P<term>[A-Z]?[a-z][A-Za-z'-]*(?: "
    r"[a-z][a-z'-]+){0,2})\*{0,2}(?: \([^)]{1,40}\))?,? "
    r"(?P<verb>is|are|refers to|refer to|occurs when|consists of|is defined as) "
    r"(?P<rest>(a|an|the (process|study|act|ability|amount|science|practice|field|branch|use|"
    r"movement|idea|name|most|largest|"
    r"main|total|number|set|part|sum|rate|result|theory|belief)|one of|any|when|defined as|made "
    r"up|used (to|in|for|as)|"
    r"characterized|based on|composed|groups?|small|large|cells|organisms|molecules|chemicals?|"
    r"substances|people|what|"
    r"typically|usually|often|also called|known as|among) .{50,800})$")
BAD_TERM = re.compile(
    r"^(it|this|that|these|those|there|here|he|she|they|we|you|what|which|who|one|another|each|"
    r"some|most|many|all|both|"
    r"figure|table|section|chapter|if|when|where|how|why|note|example|following|other|first|"
    r"second|next|last|answer|such|"
    r"his|her|its|their|our|my|your|nothing|everything|someone|only|an?|the|so|then|now|as|in|on|"
    r"at|for|if|no|not|and|but|"
    r"main|key|primary|similar|very|text|text that|string that|proposal|trailing|above|below|"
    r"important|possible|common|good|best|goal|purpose|result|reason|rest|idea|point|problem|"
    r"question|difference|default|value|file|method|property|class)\b", re.I)
ASK = ("What is {}?", "What is {}?", "Explain what {} is.", "Explain {}.", "Tell me about {}.",
       "Can you explain {}?",
       "What do you know about {}?", "Explain {} in simple terms.",
       "Give me a short description of {}.", "What is meant by {}?")
ASK_MANY = ("What are {}?", "What are {}?", "Explain what {} are.", "Explain {}.",
            "Tell me about {}.", "Can you explain {}?",
            "What do you know about {}?", "Explain {} in simple terms.",
            "Give me a short description of {}.")


def definitions(text, rng: random.Random):
    """Chats whose answer is a paragraph of the text that starts by saying what something is."""
    for par in re.split(r"\n\s*\n", text):
        par = " ".join(par.split())
        m = DEFINITION.match(par)
        if not m or not par.endswith((".", "!", ")")) or BAD_TERM.match(
            m["term"]
        ) or m["term"].endswith((" that", " of", " to", " in")) or "Figure" in par[:40]:
            continue
        if re.search(r"[<>|\[\]{}\\]|https?:|see (the )?(figure|table|section|chapter)|as (shown|"
                     r"described|discussed)|shown in|following", par, re.I):
            continue
        plural = m["verb"] in ("are", "refer to")
        term = m[
            "term"
        ] if rng.random() < 0.3 and not m["det"] else m["term"][0].lower() + m["term"][1:]
        det = (m["det"] or "").lower()
        ask = rng.choice(ASK_MANY if plural else ASK).format(det + term)
        yield f"<start_of_turn>user\n{ask}<end_of_turn>\n<start_of_turn>model\n{par}<end_of_turn>"
