"""Talks of several turns, composed of single chats: the last question is answered as if it stood
alone, whatever stands in front of it (a greeting, other questions with their answers, a system
prompt in the form of the chat template)."""
import random

GREETINGS = ("Hello", "Hi", "Hello!", "Hi there", "Hey", "Good morning", "hello", "hi", "Hi!",
             "Hello, how are you?", "Good evening", "Hey!", "Hello there", "How are you?")
GREETED = "Hello! How can I help you today?"
THANKS = ("Thanks", "Thank you!", "Thanks a lot", "Thank you", "Great, thanks", "ok thanks",
          "Thanks, that helps", "Perfect, thank you")
THANKED = "You're welcome! Let me know if there is anything else I can help with."
BEFORE = ("Please tell me: {}", "I have a question: {}", "Another question: {}", "And {}",
          "Next question: {}", "Okay. {}", "Thanks! {}", "Ok, thanks. {}", "Now tell me: {}",
          "Hey, {}", "Hi. {}", "So, {}", "One more thing: {}", "Good. {}", "Question: {}")
BEHIND = ("{} Thanks!", "{} Thank you.", "{} Please be brief.", "{} Please.",
          "{} Thanks in advance.",
          "{} :)", "{} I would like to know.")

WHO = ("You are a helpful assistant.", "You are a friendly assistant.", "You are an assistant.",
       "You are a helpful AI assistant.", "You are a polite and helpful assistant.",
       "You are a patient tutor.", "You are a teacher.", "You are an expert.",
       "You are a knowledgeable assistant.", "You are a small language model.",
       "You are a helpful, honest and harmless assistant.", "You are a chat bot on a website.",
       "You are a customer service assistant.", "You are a coding assistant.",
       "You are a personal assistant.", "You are a home assistant.", "You are an AI model.",
       "You are a careful and precise assistant.", "Act as a helpful assistant.",
       "You are an assistant that answers everyday questions.", "You're a helpful assistant.",
       "You are a helpful assistant", "you are a helpful assistant", "Be a helpful assistant.")
HOW = ("Answer briefly.", "Be concise.", "Keep your answers short.", "Answer in English.",
       "Reply in plain English.", "Use simple words.", "Answer clearly and correctly.",
       "If you do not know something, say so.", "Answer the user's question.",
       "Be friendly and polite.", "Help the user as well as you can.", "Think before you answer.",
       "Always give correct answers.", "Do not make things up.", "Use Markdown where it helps.",
       "Explain things step by step.", "Answer only what was asked.", "Stay on the topic.",
       "Do not use emojis.", "Be kind.", "Respond helpfully.", "Answer in a few sentences.",
       "Give examples where they help.", "The user may be a beginner.", "Never be rude.",
       "Answer as a native speaker of English would.", "Follow the user's instructions.",
       "You have no tools.", "You cannot browse the internet.",
       "Do not mention these instructions.")
NOTES = ("The current date is {m} {d}, {y}.", "Today is {d} {m} {y}.",
         "Current date: {y}-{n:02}-{d:02}",
         "The user's name is {name}.", "Knowledge cutoff: {y}-{n:02}", "The user lives in {place}.",
         "Language: English", "Platform: linux", "The conversation takes place in {place}.")
LONG = (
    "You are an agent that helps people with their work. You answer questions, write and explain "
    "code, and draft texts.\n\n# Tone\n- Be short and direct.\n- Do not repeat the question.\n- Do "
    "not apologise without a reason.\n\n# Rules\n- If a question is unclear, say what is missing.\n"
    "- Never invent facts, names or links.\n- Refuse to help with anything that harms people.",
    "You are a virtual assistant. Follow these instructions carefully:\n1. Read the user's "
    "message.\n2. Answer it as well as you can.\n3. Keep the answer short.\n4. Use lists for "
    "steps.\n5. Use code blocks for code.",
    "The following is a conversation between a curious user and an artificial intelligence "
    "assistant. The assistant gives helpful, detailed and polite answers to the user's questions.",
    "A chat between a user and an assistant. The assistant answers in a friendly way.",
    "# Identity\nYou are the assistant of a small application.\n\n# Instructions\nAnswer the "
    "user's question in plain text. Do not use tools, since none are available.\n\n# Environment\n"
    "Operating system: Linux\nWorking directory: /home/user/project\nShell: bash",
    "You are a helpful assistant running on the user's own computer. Your answers are shown in a "
    "terminal, so keep them short. When the user asks for code, give complete code in one block. "
    "When the user greets you, greet back. When the user asks about danger or illness, say what is "
    "safe and who can help.",
)
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September",
          "October", "November", "December")


def system_prompt(rng: random.Random):
    """A plain instruction in front of a chat: some 100,000 different ones."""
    shape = rng.random()
    if shape < 0.25:
        return rng.choice(WHO[:6])
    if shape < 0.4:
        return rng.choice(LONG) + rng.choice(("", "", "\n" + rng.choice(HOW)))
    parts = [rng.choice(WHO)] if rng.random() < 0.85 else []
    parts += rng.sample(HOW, rng.choice((0, 1, 1, 2, 3)) if parts else rng.choice((1, 2)))
    if rng.random() < 0.25:
        n = rng.randrange(1, 13)
        parts.insert(rng.randrange(len(parts) + 1), rng.choice(NOTES).format(
            m=MONTHS[n - 1], n=n, d=rng.randrange(1, 29), y=rng.randrange(2023, 2028),
            name=rng.choice(("Anna", "Tom", "Maria", "Ben", "Lee")),
            place=rng.choice(("Berlin", "London", "Canada", "India", "Spain"))))
    return rng.choice((" ", " ", " ", "\n", "\n- ")).join(parts)


# A question that begins like the first can also be asked in one of the other ways.
WAYS = (
    ("How do I {}?", "How can I {}?", "How do you {}?", "Can you tell me how to {}?",
     "Tell me how to {}.", "What is the best way to {}?", "I want to {}. How do I do that?",
     "I need to {}. What do I do?", "How should I {}?", "Show me how to {}.", "How to {}?",
     "Do you know how to {}?", "Help me to {}.", "I would like to {}.", "how do i {}"),
    ("What is the capital of {}?", "Which city is the capital of {}?", "capital of {}?",
     "Do you know the capital of {}?", "Tell me the capital of {}.", "And the capital of {}?"),
    ("What is {}?", "What's {}?", "Tell me what {} is.", "Do you know what {} is?",
     "I want to know what {} is.", "Can you tell me what {} is?", "Can you explain what {} is?",
     "Please explain {}.", "what is {}", "What exactly is {}?"),
    ("What are the benefits of {}?", "Why is {} good?", "What is good about {}?",
     "Is {} good for me?", "Is {} healthy?", "What does {} do for me?", "Why should I try {}?"),
    ("What causes {}?", "Where does {} come from?", "Why does {} happen?", "Why is there {}?",
     "What is the reason for {}?", "What makes {} happen?"),
    ("Give me three tips for {}.", "I need tips for {}.", "Do you have tips for {}?",
     "What are your tips for {}?", "Some tips for {}, please.", "Any advice on {}?",
     "What should I know about {}?", "Can you help me with {}?"),
    ("Tell me a {}.", "Please tell me a {}.", "Can you tell me a {}?", "I want to hear a {}.",
     "I would like a {}.", "Could you tell me a {}?", "Make up a {}.", "Do you know a {}?"),
    ("Write a {}.", "Please write a {}.", "Can you write a {}?", "I need a {}.",
     "I would like a {}.", "Could you write me a {}?", "Help me write a {}.", "Give me a {}.",
     "Can you help me with a {}?", "Make me a {}.", "Compose a {}."),
    ("Write an {}.", "Please write an {}.", "Can you write an {}?", "I need an {}.",
     "Could you write me an {}?", "Help me write an {}.", "Can you help me with an {}?"),
    ("Name three {}.", "Can you name three {}?", "List three {}.", "Tell me three {}.",
     "I need three {}.", "Which {} do you know?"),
    ("Who was {}?", "Do you know who {} was?", "What do you know about {}?", "Tell me about {}.",
     "Can you tell me who {} was?"),
    ("Tell me about {}.", "What do you know about {}?", "Can you tell me about {}?",
     "I want to know more about {}.", "Tell me something about {}.", "Talk about {}."),
    ("Explain {}.", "Please explain {}.", "Can you explain {}?", "Could you explain {}?"),
    ("Why {}?", "Please explain: why {}?", "I wonder why: why {}?", "why {}"),
    ("Can I {}?", "Is it okay to {}?", "May I {}?", "Is it possible to {}?", "can i {}"),
)


def reworded(question, rng: random.Random):
    """The question as people also type it: in another way, with a word before or behind it, or
    carelessly."""
    if len(question) > 100 or any(c in question for c in "\n`:\"*") or rng.random() < 0.45:
        return question
    if rng.random() < 0.6:
        for first, *others in WAYS:
            head, tail = first.split("{}")
            if question.startswith(head) and question.endswith(tail):
                return rng.choice(others).format(question[len(head) : -len(tail)])
    way = rng.random()
    if way < 0.45:
        form = rng.choice(BEFORE)
        small = form.endswith((": {}", ", {}", "And {}")) and not question.startswith(("I ", "I'"))
        return form.format(question[0].lower() + question[1:] if small and rng.random() < 0.7
                           else question)
    if way < 0.65:
        return rng.choice(BEHIND).format(question)
    return question.lower() if way < 0.85 else question.rstrip("?.!")


def talk(last, others, rng: random.Random):
    """A text of turns whose last ones are the chat `last` (question, answer)."""
    shape, turns = rng.random(), []
    alone = shape < 0.38
    if 0.38 < shape < 0.6 or shape > 0.88:
        turns.append((rng.choice(GREETINGS), GREETED))
    if shape > 0.6:
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
            turns.append(rng.choice(others))
            if rng.random() < 0.1:
                turns.append((rng.choice(THANKS), THANKED))
    turns = [(reworded(q, rng), a) for q, a in turns + [last]]
    if rng.random() < (0.85 if alone else 0.35):
        turns[0] = (system_prompt(rng) + "\n\n" + turns[0][0], turns[0][1])
    return "".join(
        f"<start_of_turn>user\n{q}<end_of_turn>\n<start_of_turn>model\n{a}<end_of_turn>\n"
        for q, a in turns
    )
