#!/usr/bin/env python3
"""Runs one process for long and compares every answer and the memory: soak.py serve|batch GEMMA

  serve          mixed requests of many clients: chats, completions, streams, several answers, JSON,
                 penalties, scored prompts, malformed requests; a part is cancelled
  batch          one `gemma generate --batch` over many records

  --requests N   requests or records in all (10,000)
  --minutes M    serve: goes on for so long instead
  --clients N    serve: requests at once (8)
  --lose S       serve: the GPU is lost after so many seconds of work, again and again; needs a
                 build with the feature `testing`
  other options  go to gemma, as `-d vulkan`, `-m DIR` or `-m A -m B --keep-alive 1s`

Each answer of `serve` is compared with the same server's answer before the soak, when nothing
else ran and no device was lost; each answer of `batch` with the first one to the same record.
Exits 1 if an answer differs or the memory grows by more than 2 % after the first fifth. A refusal
for load (429 or 503) counts as wrong unless it has a message and Retry-After.

With several models, each answer is compared with the one of `gemma generate --batch`. Clients
choose at random among some of the models, and every few seconds among others, so that models are
unloaded while others answer. The memory counts after each tenth, when no model is loaded.
"""

import argparse
import http.client
import json
import os
import random
import re
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

WORDS = "river house winter music bread ship letter garden moon teacher".split()
SUBMIT = 9  # The counter of submissions among those of crates/base/src/testing.rs.
COUNTERS = 11
CHANGE = 6  # Seconds for which clients choose among the same models.


def requests():
    """Returns bodies with their paths, 48 in all."""
    bodies = []
    for i, word in enumerate(WORDS):
        ask = [{"role": "user", "content": f"Write a sentence about a {word}."}]
        chat, more = {"messages": ask, "max_tokens": 8 + i, "seed": i}, {"ignore_eos": True}
        bodies += [
            ("/v1/chat/completions", {**chat, **more, "temperature": 0}),
            ("/v1/chat/completions", {**chat, **more, "temperature": 1, "n": 1 + i % 3}),
            ("/v1/completions",
             {"prompt": f"The {word} " * (1 + 9 * i), "max_tokens": 6, "seed": i}),
            ("/v1/chat/completions", {**chat, "frequency_penalty": 1, "presence_penalty": 0.5}),
        ]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for i in range(4):
        bodies.append(("/v1/chat/completions", {
            "messages": [{"role": "user", "content": f"Give a number: {i}"}], "seed": i,
            "max_tokens": 20, "response_format": shape}))
    for i in range(4):
        bodies.append(("/v1/completions", {
            "prompt": f"The {WORDS[i]} is", "max_tokens": 1, "echo": True, "logprobs": 2,
            "seed": i}))
    return bodies


def texts(reply):
    """Returns the texts of an answer, and its scores."""
    return [(c.get("text") or (c.get("message") or {}).get("content"), c.get("logprobs"))
            for c in reply["choices"]]


class Refusal(Exception):
    """A refusal for load that says why, and when to ask again."""


def check_refusal(reply, answer):
    if reply.status in (429, 503) and reply.getheader("Retry-After"):
        if answer["error"]["message"]:
            raise Refusal


def generate(gemma, model, bodies):
    """Returns the texts of `gemma generate --batch`."""
    lines = [{"custom_id": str(i), "method": "POST", "url": path, "body": body}
             for i, (path, body) in enumerate(bodies)]
    done = subprocess.run([gemma, "generate", "-q", "-m", model, "--batch", "-"], text=True,
                          input="\n".join(map(json.dumps, lines)), check=True,
                          stdout=subprocess.PIPE)
    return [texts(json.loads(line)["response"]["body"]) for line in done.stdout.splitlines()]


class Server:
    def __init__(self, gemma, options, environment):
        self.counts = tempfile.NamedTemporaryFile()
        self.counts.write(bytes(8 * COUNTERS))
        self.counts.flush()
        environment = {**os.environ, **environment, "GEMMA_FAIL_COUNTS": self.counts.name}
        self.process = subprocess.Popen([gemma, "serve", "--port", "0", *options], text=True,
                                        env=environment, stderr=subprocess.PIPE)
        self.said, self.address = [], None
        while not self.address:
            line = self.process.stderr.readline()
            assert line, "no server: " + "".join(self.said)
            self.said.append(line)
            found = re.search(r"answers at http://(\S+)", line)
            self.address = found and found[1]
        threading.Thread(target=lambda: self.said.extend(self.process.stderr), daemon=True).start()

    def submissions(self):
        with open(self.counts.name, "rb") as file:
            return struct.unpack(f"{COUNTERS}Q", file.read())[SUBMIT]

    def ask(self, path, body):
        connection = http.client.HTTPConnection(self.address, timeout=600)
        connection.request("POST", path, body if isinstance(body, str) else json.dumps(body))
        reply = connection.getresponse()
        answer = reply.status, json.loads(reply.read())
        connection.close()
        check_refusal(reply, answer[1])
        return answer

    def stream(self, path, body, events=None):
        """Returns the texts of a streamed answer, or cuts it off after some events."""
        connection = http.client.HTTPConnection(self.address, timeout=600)
        connection.request("POST", path, json.dumps({**body, "stream": True}))
        reply, parts = connection.getresponse(), {}
        if reply.status != 200:
            error = json.loads(reply.read())
            check_refusal(reply, error)
            raise RuntimeError(error)
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"])
            for choice in event["choices"]:
                part = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                parts[choice["index"]] = parts.get(choice["index"], "") + part
            if events is not None and (events := events - 1) < 0:
                break
        connection.close()
        return [parts[i] for i in sorted(parts)]

    def get(self, path):
        connection = http.client.HTTPConnection(self.address, timeout=60)
        connection.request("GET", path)
        return connection.getresponse().read().decode()

    def metric(self, name):
        """Returns a figure, of all models together."""
        found = re.findall(rf"^{name}(?:{{model=.*}})? (\S+)$", self.get("/metrics"), re.M)
        return sum(map(float, found))

    def wait_until_unloaded(self):
        # The lists leave a model out before its memory is free.
        while self.metric("gemma_model_loaded"):
            time.sleep(0.1)

    def end(self):
        self.process.terminate()
        return self.process.wait()


def resident(pid):
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def verdict(name, done, memory, wrong, more=""):
    """Prints the figures and exits. `memory` has pairs of done requests and kB."""
    warm = [kb for n, kb in memory if n >= done / 5]
    start, most = warm[0], max(warm)
    growth = 100 * (most - start) / start
    print(f"{name}: {done} done, {len(wrong)} wrong, memory {start / 1024:.1f} MiB after a fifth, "
          f"at most {most / 1024:.1f} MiB later ({growth:+.2f} %){more}")
    for what in wrong[:5]:
        print(what)
    sys.exit(1 if wrong or growth > 2 else 0)


def serve(args, options):
    before = Server(args.gemma, options, {})
    models = [model["id"] for model in json.loads(before.get("/v1/models"))["data"]]
    bodies = [(path, {**body, "model": model}) for model in models for path, body in requests()]
    expected = []
    for path, body in bodies:
        status, reply = before.ask(path, body)
        assert status == 200, reply
        expected.append(texts(reply))
    if len(models) > 1:
        paths = [path for option, path in zip(options, options[1:]) if option in ("-m", "--model")]
        assert len(paths) == len(models), f"{models} are not those of -m: {paths}"
        alone = [text for path in paths for text in generate(args.gemma, path, requests())]
        for body, served, made in zip(bodies, expected, alone):
            assert served == made, f"{body}: {served} and not {made} of gemma generate"
    # The rate of submissions under the load of the soak.
    begun, submissions = time.time(), before.submissions()
    with ThreadPoolExecutor(args.clients) as pool:
        list(pool.map(lambda request: before.ask(*request), bodies * 10))
    rate = (before.submissions() - submissions) / (time.time() - begun)
    before.end()
    environment = {}
    if args.lose:
        gap = int(rate * args.lose)
        assert gap > 100, f"{rate:.1f} submissions a second: no GPU at work"
        environment["GEMMA_FAIL_CALL"] = f"submit@{gap}*"
    server = Server(args.gemma, options, environment)
    lock, wrong, memory = threading.Lock(), [], []
    counts = {"whole": 0, "streamed": 0, "cancelled": 0, "malformed": 0, "refused": 0}
    kinds = list(counts)[:4]
    state = {"begun": 0}
    begun = time.time()

    def choose(dice):
        """Returns the number of a request, to one of the models of these seconds."""
        now = random.Random(int((time.time() - begun) / CHANGE))
        chosen = now.sample(range(len(models)), now.randint(1, len(models)))
        each = len(bodies) // len(models)
        return dice.choice(chosen) * each + dice.randrange(each)

    def one(n):
        dice = random.Random(n)
        which = choose(dice)
        path, body = bodies[which]
        kind = dice.choices(kinds, [6, 3, 1, 0.5])[0]
        plain = [text for text, _ in expected[which]]
        if kind == "cancelled" and body.get("logprobs"):
            kind = "whole"  # Scores of a prompt are not streamed.
        if kind == "malformed":
            got, right = server.ask(path, '{"messages": 7')[0], 400
        elif kind == "cancelled":
            server.stream(path, {**body, "max_tokens": 200}, dice.randrange(5))
            got = right = None
        elif kind == "streamed" and not body.get("logprobs"):
            got, right = server.stream(path, body), plain
        else:
            status, reply = server.ask(path, body)
            got, right = texts(reply) if status == 200 else reply, expected[which]
        if got != right:
            raise AssertionError(f"{got!r} and not {right!r}")
        return kind

    def lane(share):
        while True:
            with lock:
                n = state["begun"]
                if args.minutes:
                    is_over = time.time() > begun + 60 * args.minutes * share
                else:
                    is_over = n >= args.requests * share
                if is_over or len(wrong) > 20:
                    return
                state["begun"] += 1
            try:
                kind = one(n)
                with lock:
                    counts[kind] += 1
            except Refusal:
                with lock:
                    counts["refused"] += 1
            except Exception as error:
                with lock:
                    wrong.append(f"request {n}: {type(error).__name__}: {error}"[:600])
            if n % 50 == 0 and len(models) == 1:
                with lock:
                    memory.append((n, resident(server.process.pid)))

    parts = 1 if len(models) == 1 else 10
    for part in range(parts):
        share = (part + 1) / parts
        lanes = [threading.Thread(target=lane, args=[share]) for _ in range(args.clients)]
        for thread in lanes:
            thread.start()
        for thread in lanes:
            thread.join()
        if len(models) > 1:
            server.wait_until_unloaded()
            memory.append((state["begun"], resident(server.process.pid)))
            print(f"{memory[-1][0]} requests, {memory[-1][1] / 1024:.1f} MiB", flush=True)
    time.sleep(1)
    left = server.metric("gemma_running_texts") + server.metric("gemma_queue_length")
    losses = server.metric("gemma_device_losses_total")
    loads = server.metric("gemma_model_loads_total")
    memory.append((state["begun"], resident(server.process.pid)))
    if args.lose and not losses:
        wrong.append("no device was lost")
    if left:
        wrong.append(f"{left} texts left")
    if (code := server.end()) not in (0, 143):
        wrong.append(f"exit code {code}: " + "".join(server.said[-3:]))
    done = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    verdict("serve", state["begun"], memory, wrong,
            f"; {done}, {losses:.0f} devices lost, {loads:.0f} loads")


def batch(args, options):
    with tempfile.TemporaryDirectory() as place:
        with open(f"{place}/in", "w") as file:
            for n in range(args.requests):
                file.write(json.dumps({
                    "id": n, "max_tokens": 4 + n % 5, "seed": n % 20, "ignore_eos": True,
                    "prompt": f"Write about a {WORDS[n % 10]} and a {WORDS[n // 10 % 10]}.",
                }) + "\n")
        process = subprocess.Popen([args.gemma, "generate", "--batch", f"{place}/in", "-q",
                                    "--resume", f"{place}/out", *options])
        memory = []
        while process.poll() is None:
            time.sleep(0.2)
            try:
                with open(f"{place}/out", "rb") as file:
                    memory.append((file.read().count(b"\n"), resident(process.pid)))
            except (OSError, StopIteration):
                pass
        wrong, first = [], {}
        if process.returncode != 0:
            wrong.append(f"exit code {process.returncode}")
        with open(f"{place}/out") as file:
            lines = [json.loads(line) for line in file]
        for n, line in enumerate(lines):
            text = line.get("text")
            if first.setdefault(n % 100, text) != text or text is None or line["id"] != n:
                wrong.append(f"record {n}: {line} and not {first[n % 100]!r}")
        if len(lines) != args.requests:
            wrong.append(f"{len(lines)} answers")
    verdict("batch", len(lines), memory, wrong)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("which", choices=["serve", "batch"])
parser.add_argument("gemma")
parser.add_argument("--requests", type=int, default=10_000)
parser.add_argument("--minutes", type=float)
parser.add_argument("--clients", type=int, default=8)
parser.add_argument("--lose", type=float)
arguments, rest = parser.parse_known_args()
{"serve": serve, "batch": batch}[arguments.which](arguments, rest)
