"""Measures a server: see serve.sh, which starts it.

serve.py overhead|engine|peer|agents|report HOST:PORT [OPTIONS of the server, which the
engine alone is measured with too]
"""

import http.client
import json
import os
import statistics
import subprocess
import sys
import threading
import time

from llama_batched import batched_speeds

which, address, options = sys.argv[1], sys.argv[2], sys.argv[3:]
TOKENS = int(os.environ.get("TOKENS", 200))
CLIENTS = [int(n) for n in os.environ.get("CLIENTS", "1 8 32").split()]
LONG = int(os.environ.get("LONG", 5600))
ROUNDS = int(os.environ.get("ROUNDS", 3))
PAIRS = int(os.environ.get("PAIRS", 10))
TURNS = int(os.environ.get("TURNS", 20))
RULES = int(os.environ.get("RULES", 350))
QUESTION = "Write a story about a house by the sea."


def ask(messages, tokens, seed=1, **more):
    """Streams an answer. Returns its text, the times of its events, and its usage."""
    connection = http.client.HTTPConnection(address, timeout=600)
    body = {"messages": messages, "max_tokens": tokens, "seed": seed, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True}, **more}
    begun = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    reply = connection.getresponse()
    if reply.status != 200:
        raise RuntimeError(reply.read())
    text, times, usage = "", [], None
    for line in reply:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(event)
        usage = event.get("usage") or usage
        part = "".join(c["delta"].get("content") or "" for c in event["choices"])
        if part:
            times.append(time.perf_counter() - begun)
            text += part
    connection.close()
    return text, times, usage


def user(text):
    return [{"role": "user", "content": text}]


def metric(name):
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    return next(float(line.split()[1]) for line in page.splitlines()
                if line.startswith(name + " "))


def overhead():
    """Compares the time per token with that of `gemma generate`; they alternate. Both run without
    drafts, because those of a server that has answered the same before are better."""
    alone, served = [], []
    for _ in range(PAIRS):
        command = [os.environ["GEMMA"], "generate", "-q", "--stats", "json", "--ignore-eos",
                   "-n", str(TOKENS), "--seed", "1", *options, QUESTION]
        said = subprocess.run(command, capture_output=True, text=True, check=True,
                              stdin=subprocess.DEVNULL)
        alone.append(1 / json.loads(said.stderr)["timings"]["decode_tps"])
        _, times, usage = ask(user(QUESTION), TOKENS)
        served.append((times[-1] - times[0]) / (usage["completion_tokens"] - 1))
    for name, of in (("least", min), ("median", statistics.median)):
        one, other = of(alone), of(served)
        print(f"time a token, {name} of {PAIRS}: alone {one * 1e3:.3f} ms, "
              f"served {other * 1e3:.3f} ms, {(other / one - 1) * 100:+.1f} %")


def throughput():
    """Measures clients at once. Each round has other questions. The first rounds include the
    compilation of kernels."""
    for clients in CLIENTS:
        speeds, firsts = [], []
        for turn in range(ROUNDS):
            done = []
            begun = time.perf_counter()
            threads = [threading.Thread(target=lambda n=n: done.append(
                ask(user(f"{QUESTION} ({turn}, {n})"), TOKENS, seed=n))) for n in range(clients)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            assert len(done) == clients
            seconds = time.perf_counter() - begun
            speeds.append(sum(usage["completion_tokens"] for _, _, usage in done) / seconds)
            firsts.append(sorted(times[0] for _, times, _ in done)[clients // 2])
        print(f"{clients} clients: {statistics.median(speeds):.0f} tokens a second, first token "
              f"after {statistics.median(firsts) * 1e3:.0f} ms (medians of {ROUNDS} rounds; "
              f"{min(speeds):.0f} to {max(speeds):.0f})")


def peer():
    """Measures llama.cpp's batched generation of the same model."""
    for texts, speed in batched_speeds(options[options.index("-m") + 1], CLIENTS, TOKENS):
        print(f"llama.cpp, {texts} texts at once: {speed:.0f} tokens a second")


def beside_long_prompt():
    short = "word " * 50
    alone = min(ask(user(f"{short} {n}"), 2)[1][0] for n in range(3))
    # The first time includes the compilation of kernels.
    for turn, words in enumerate((LONG // 8, LONG)):
        long = " ".join(f"item {turn} {n}" for n in range(words // 3))
        times, rounds = {}, metric("gemma_rounds_total")
        reader = threading.Thread(target=lambda: times.update(long=ask(user(long), 2)))
        reader.start()
        time.sleep(0.2)
        during = ask(user(f"{short} x{turn}"), 2)[1][0]
        reader.join()
        rounds = metric("gemma_rounds_total") - rounds
    _, long_times, usage = times["long"]
    print(f"first token of a short prompt: alone {alone * 1e3:.0f} ms, during a prompt of "
          f"{usage['prompt_tokens']} tokens {during * 1e3:.0f} ms, which are "
          f"{during / (long_times[-1] / rounds):.1f} rounds (that one: {long_times[0]:.1f} s in "
          f"{rounds:.0f} rounds)")


class Agent:
    """A conversation with a long system message. Counts the tokens that are read more than once."""

    def __init__(self, number, rules):
        system = f"You are agent {number}. " + "".join(
            f"Rule {rule}: say what is known of item {rule}, briefly. " for rule in range(rules))
        self.messages = [{"role": "system", "content": system}]
        self.turns = self.held = self.again = self.read = 0

    def turn(self):
        self.messages.append({"role": "user", "content": f"Step {self.turns}: what is next?"})
        text, _, usage = ask(self.messages, 20, seed=self.turns)
        self.messages.append({"role": "assistant", "content": text})
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        # The whole turn before, prompt and answer, was in a cache once.
        self.again += max(self.held - cached, 0)
        self.read += usage["prompt_tokens"]
        self.held = usage["prompt_tokens"] + usage["completion_tokens"]
        self.turns += 1


def share(again, read):
    return f"{100 * again / read:.1f} % of {read} prompt tokens read again"


def agents():
    """Measures the share of tokens that is read more than once in growing conversations."""
    alone = Agent(0, RULES)
    for _ in range(TURNS):
        alone.turn()
    print(f"agent of {TURNS} turns, alone: {share(alone.again, alone.read)}")
    many = [Agent(1 + n, RULES) for n in range(9)]
    for _ in range(TURNS):
        for one in many:
            one.turn()
    again, read = sum(one.again for one in many), sum(one.read for one in many)
    print(f"9 agents in turn, each after 8 others: {share(again, read)}")
    rules = " ".join(f"Rule {rule}: never forget the rules." for rule in range(RULES))
    again = read = 0
    for client in range(20):
        messages = [{"role": "system", "content": rules}, *user(f"I am client {client}.")]
        _, _, usage = ask(messages, 5)
        read += usage["prompt_tokens"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        # The last tokens are the client's own.
        again += max(usage["prompt_tokens"] - 20 - cached, 0) if client else 0
    print(f"20 clients with one system message: {share(again, read)}")


def report():
    """Sends one question about a long report. serve.sh does this with several servers in turn, and
    the last run compares the answers. The file FOUND has the earlier answer."""
    rules = " ".join(f"Item {n} of the report costs {n * 37 % 1000}." for n in range(LONG // 8))
    name, question = os.environ["QUESTION"].split(": ")
    text, times, usage = ask(user(f"{rules}\n\n{question}"), TOKENS)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    print(f"{name}: first token after {times[0]:.2f} s, {cached} of {usage['prompt_tokens']} "
          f"tokens of the prompt from the cache")
    found = os.environ["FOUND"]
    if os.path.exists(found):
        with open(found) as earlier:
            assert json.load(earlier) == text, "the cache changed the text"
        print("the same text with and without the cache")
    elif cached:
        with open(found, "w") as file:
            json.dump(text, file)


PARTS = {"overhead": (overhead,), "engine": (throughput, beside_long_prompt), "peer": (peer,),
         "agents": (agents,), "report": (report,)}
for part in PARTS[which]:
    part()
