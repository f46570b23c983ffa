"""Measures a server: see bench-serve.sh, which starts it.

bench_serve.py HOST:PORT [OPTIONS of the server, which the engine alone is measured with too]
"""

import http.client
import json
import os
import subprocess
import sys
import threading
import time

address, options = sys.argv[1], sys.argv[2:]
TOKENS = int(os.environ.get("TOKENS", 200))
CLIENTS = [int(n) for n in os.environ.get("CLIENTS", "1 8 32").split()]
LONG = int(os.environ.get("LONG", 4000))
SOAK = int(os.environ.get("SOAK", 1000))
QUESTION = "Write a story about a house by the sea."


def ask(messages, tokens, seed=1, **more):
    """Streams an answer: its text, times of its events, and its usage."""
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
    """Time a token beyond what `gemma generate` takes, alternating, the least of each."""
    alone, served = [], []
    for _ in range(5):
        command = [os.environ["GEMMA"], "generate", "-q", "--stats", "json", "--ignore-eos",
                   "-n", str(TOKENS), "--seed", "1", *options, QUESTION]
        said = subprocess.run(command, capture_output=True, text=True, check=True,
                              stdin=subprocess.DEVNULL)
        alone.append(1 / json.loads(said.stderr)["timings"]["decode_tps"])
        _, times, usage = ask(user(QUESTION), TOKENS)
        served.append((times[-1] - times[0]) / (usage["completion_tokens"] - 1))
    print(f"time a token: alone {min(alone) * 1e3:.3f} ms, served {min(served) * 1e3:.3f} ms, "
          f"{(min(served) / min(alone) - 1) * 100:+.1f} %")


def throughput():
    for clients in CLIENTS:
        done = []
        begun = time.perf_counter()
        threads = [threading.Thread(target=lambda n=n: done.append(
            ask(user(f"{QUESTION} ({n})"), TOKENS, seed=n))) for n in range(clients)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert len(done) == clients
        seconds = time.perf_counter() - begun
        tokens = sum(usage["completion_tokens"] for _, _, usage in done)
        first = sorted(times[0] for _, times, _ in done)[clients // 2]
        print(f"{clients} clients: {tokens / seconds:.0f} tokens a second, "
              f"first token after {first * 1e3:.0f} ms (median)")


def beside_long_prompt():
    short = "word " * 50
    alone = min(ask(user(f"{short} {n}"), 2)[1][0] for n in range(3))
    long = " ".join(f"item {n}" for n in range(LONG // 2))
    times = {}
    reader = threading.Thread(target=lambda: times.update(long=ask(user(long), 2)[1][0]))
    reader.start()
    time.sleep(0.2)
    beside = ask(user(f"{short} x"), 2)[1][0]
    reader.join()
    print(f"first token of a short prompt: alone {alone * 1e3:.0f} ms, beside a prompt of {LONG} "
          f"words {beside * 1e3:.0f} ms (that one took {times['long']:.1f} s)")


def agent():
    """Twenty turns: how much of the prompts is read again."""
    messages = [{"role": "system", "content": "You are an agent. " + "Rule: be brief. " * 300}]
    again = read = held = 0
    for turn in range(20):
        messages.append({"role": "user", "content": f"Step {turn}: what is next?"})
        text, _, usage = ask(messages, 20, seed=turn)
        messages.append({"role": "assistant", "content": text})
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        again += max(held - cached, 0)
        read += usage["prompt_tokens"]
        held = usage["prompt_tokens"]
    print(f"agent of 20 turns: {100 * again / read:.1f} % of {read} prompt tokens read again")


def soak():
    expected = ask(user("Who are you?"), 10, temperature=0)[0]
    memory, wrong, unanswered = [], [], []

    def one(n):
        connection = http.client.HTTPConnection(address, timeout=600)
        try:
            if n % 10 == 0:
                connection.request("POST", "/v1/chat/completions", '{"messages": 7}')
                if connection.getresponse().status != 400:
                    wrong.append(n)
            elif n % 10 in (1, 2):
                body = {"messages": user("Who are you?"), "max_tokens": 100, "ignore_eos": True}
                connection.request("POST", "/v1/chat/completions", json.dumps(body))
                time.sleep(n * 7 % 50 / 1000)
            elif ask(user("Who are you?"), 10, temperature=0)[0] != expected:
                wrong.append(n)
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            unanswered.append((n, error))
        connection.close()

    def resident():
        with open(f"/proc/{os.environ['SERVER']}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

    for part in range(4):
        numbers = list(range(part * SOAK // 4, (part + 1) * SOAK // 4))
        lock = threading.Lock()

        def lane():
            while True:
                with lock:
                    if not numbers:
                        return
                    n = numbers.pop()
                one(n)

        lanes = [threading.Thread(target=lane) for _ in range(16)]
        [thread.start() for thread in lanes]
        [thread.join() for thread in lanes]
        memory.append(resident())
    time.sleep(1)
    left = metric("gemma_running_texts") + metric("gemma_queue_length")
    print(f"soak of {SOAK} requests: {len(wrong)} wrong, {len(unanswered)} unanswered, "
          f"{left:.0f} texts left, memory {' -> '.join(f'{kb / 1024:.0f}' for kb in memory)} MiB")
    assert not wrong and not unanswered and not left, (wrong[:3], unanswered[:3])


for part in (overhead, throughput, beside_long_prompt, agent, soak):
    part()
