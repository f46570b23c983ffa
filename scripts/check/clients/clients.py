"""Drives servers of the bundled model with clients from their registries.

clients.py GEMMA DEMO AGENTS SCRATCH CLIENTS [NAME...]

GEMMA is the binary, DEMO and AGENTS are addresses of servers with the logs SCRATCH/demo/said and
SCRATCH/long/said. CLIENTS contains the installations. Each client is installed separately, and runs
in its own process, home directory and project: a function of this file, in the client's Python if
it is a Python package.
"""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

QUESTION = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": QUESTION}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": TOOL}]
OPTIONS = {"temperature": 0, "max_tokens": 20}
LONGER = {"temperature": 0, "max_tokens": 200}
OLLAMA = {"temperature": 0, "num_predict": 20}
# A time that an agent's requests of 25,000 tokens need on two slow cores.
PATIENCE = 1200


def run(*command, cwd=None, stdin=subprocess.DEVNULL, **environment):
    """Runs a command and returns its standard output. A failure prints all of its output."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, stdin=stdin, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **environment})
    assert done.returncode == 0, f"{command[0]} failed\n{done.stdout}\n{done.stderr}"
    return done.stdout


def answer(*prompt, tokens=20):
    """Returns the answer of the program itself at temperature 0."""
    return run(GEMMA, "generate", "-q", "--no-newline", "--temp", 0, "-n", tokens, *prompt)


def refused(kind, word, call):
    """Checks that `call` raises `kind` and that the message contains `word`."""
    try:
        call()
    except kind as error:
        assert word in str(error), error
    else:
        raise AssertionError(f"{word} was taken")


def keys(arguments):
    """Returns the keys of the arguments of a call, from text or an object."""
    return set(json.loads(arguments) if isinstance(arguments, str) else arguments)


def openai_python():
    import openai
    from pydantic import BaseModel

    class City(BaseModel):
        name: str
        people: int

    client = openai.OpenAI(base_url=f"{DEMO}/v1", api_key="none")
    expected = answer(QUESTION)
    chat = client.chat.completions
    one = {"model": client.models.list().data[0].id, "messages": MESSAGES}
    whole = chat.create(**one, **OPTIONS)
    assert whole.choices[0].message.content == expected, whole
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    stream = list(chat.create(
        **one, stream=True, stream_options={"include_usage": True}, **OPTIONS))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == expected, text
    assert stream[-1].usage.completion_tokens == whole.usage.completion_tokens
    chances = chat.create(**one, logprobs=True, top_logprobs=2, **OPTIONS).choices[0].logprobs
    assert len(chances.content) == whole.usage.completion_tokens

    forced = {**one, **LONGER, "tools": TOOLS, "tool_choice": "required",
              "parallel_tool_calls": False}
    call = chat.create(**forced).choices[0]
    assert call.finish_reason == "tool_calls", call
    function = call.message.tool_calls[0].function
    assert function.name == "weather" and keys(function.arguments) == {"city"}
    with chat.stream(**forced) as stream:
        final = stream.until_done().get_final_completion().choices[0].message
    assert final.tool_calls[0].function.arguments == function.arguments
    result = {"role": "tool", "tool_call_id": call.message.tool_calls[0].id, "content": "sunny"}
    chat.create(**{**one, "messages": [*MESSAGES, call.message, result]}, tools=TOOLS, **OPTIONS)
    assert chat.parse(**one, response_format=City, **LONGER).choices[0].message.parsed.name

    # Another model's name, fields that change no text, and two consecutive user messages.
    other = chat.create(model="gpt-5", messages=MESSAGES, reasoning_effort="low",
                        verbosity="low", presence_penalty=0, logit_bias={}, **OPTIONS)
    assert other.choices[0].message.content == expected
    chat.create(model="gpt-5", messages=MESSAGES * 2, **OPTIONS)
    least = chat.create(**one, frequency_penalty=2, presence_penalty=2, **LONGER)
    words = least.choices[0].message.content.split()
    assert len(set(words)) > len(words) / 2, words

    responses = client.responses
    options = {"model": "demo", "input": QUESTION, "temperature": 0, "max_output_tokens": 20}
    assert responses.create(**options).output_text == expected
    with responses.stream(**options) as stream:
        parts = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(parts) == expected
    raw = client.completions.create(
        model="demo", prompt="The sky is", max_tokens=5, temperature=0, echo=True, logprobs=2)
    assert raw.choices[0].text.startswith("The sky is")
    # The usage counts the BOS in front too.
    assert len(raw.choices[0].logprobs.tokens) == raw.usage.total_tokens - 1, raw
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    refused(openai.BadRequestError, "image_url", lambda: chat.create(
        model="demo", messages=[{"role": "user", "content": [image]}]))
    refused(openai.APIStatusError, "mbedding", lambda: client.embeddings.create(
        model="demo", input="a"))


def anthropic_python():
    from anthropic import Anthropic

    client = Anthropic(base_url=DEMO, api_key="none")
    expected = answer(QUESTION)
    # The package itself does not know `temperature`.
    options = {"model": "claude-sonnet-4-5", "messages": MESSAGES, "max_tokens": 20,
               "extra_body": {"temperature": 0}}
    whole = client.messages.create(**options)
    assert whole.content[0].text == expected, whole
    with client.messages.stream(**options) as stream:
        start = next(event for event in stream if event.type == "message_start")
        assert "".join(stream.text_stream) == expected
        final = stream.get_final_message()
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(model="x", messages=MESSAGES).input_tokens
    for usage in (whole.usage, start.message.usage):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted, usage
    tool = {"name": "weather", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
    call = client.messages.create(
        **{**options, "max_tokens": 200}, tools=[tool], tool_choice={"type": "any"})
    assert call.stop_reason == "tool_use" and keys(call.content[0].input) == {"city"}, call
    result = {"type": "tool_result", "tool_use_id": call.content[0].id, "content": "sunny"}
    talk = [*MESSAGES, {"role": "assistant", "content": call.content},
            {"role": "user", "content": [result]}]
    client.messages.create(**{**options, "messages": talk}, tools=[tool])
    client.messages.create(
        **options, thinking={"type": "enabled", "budget_tokens": 1024},
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}])


def litellm():
    import litellm

    litellm.telemetry = False
    expected = answer(QUESTION)
    # LiteLLM writes this prompt itself for Ollama's /api/generate.
    plain = answer(f"### User:\n{QUESTION}\n\n")
    for model, end, text in (
        ("openai/demo", "/v1", expected), ("ollama/demo", "", plain),
        ("ollama_chat/demo", "", expected), ("anthropic/demo", "", expected),
    ):
        options = {"model": model, "api_base": DEMO + end, "api_key": "none",
                   "messages": MESSAGES, **OPTIONS}
        whole = litellm.completion(**options)
        assert whole.choices[0].message.content == text, (model, whole)
        stream = list(litellm.completion(
            **options, stream=True, stream_options={"include_usage": True}))
        parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        assert "".join(parts) == text, (model, parts)
        assert any(getattr(chunk, "usage", None) for chunk in stream), model
        if text is expected:
            call = litellm.completion(**{**options, **LONGER}, tools=TOOLS)
            assert call.choices[0].finish_reason, model


def langchain(model, longer):
    """Checks one chat model of LangChain: whole, streamed, with functions and with a schema."""
    expected = answer(QUESTION)
    assert model.invoke(QUESTION).content == expected
    assert "".join(chunk.text for chunk in model.stream(QUESTION)) == expected
    longer.bind_tools(TOOLS).invoke(QUESTION)
    shaped = longer.with_structured_output({"title": "city", **SCHEMA}, method="json_schema")
    assert set(shaped.invoke(QUESTION)) == {"city"}


def langchain_openai():
    from langchain_openai import ChatOpenAI

    made = {"base_url": f"{DEMO}/v1", "api_key": "none", "model": "demo"}
    langchain(ChatOpenAI(**made, **OPTIONS), ChatOpenAI(**made, **LONGER))


def langchain_anthropic():
    from langchain_anthropic import ChatAnthropic

    made = {"base_url": DEMO, "api_key": "none", "model": "claude-sonnet-4-5"}
    langchain(ChatAnthropic(**made, **OPTIONS), ChatAnthropic(**made, **LONGER))


def langchain_ollama():
    from langchain_ollama import ChatOllama

    made = {"base_url": DEMO, "model": "gemma3", "temperature": 0}
    langchain(ChatOllama(**made, num_predict=20), ChatOllama(**made, num_predict=200))


def ollama():
    import ollama

    client = ollama.Client(host=DEMO)
    expected = answer(QUESTION)
    model = client.list().models[0].model
    assert "completion" in client.show(model).capabilities
    chat = {"model": model, "messages": MESSAGES}
    whole = client.chat(**chat, options=OLLAMA)
    assert whole.message.content == expected and whole.eval_count, whole
    stream = client.chat(**chat, options=OLLAMA, stream=True)
    assert "".join(part.message.content for part in stream) == expected
    made = client.generate(model="gemma3:27b", prompt=QUESTION, options=OLLAMA, keep_alive="5m")
    assert made.response == expected, made
    raw = client.generate(model=model, prompt="The sky is", raw=True, options=OLLAMA).response
    assert raw == answer("--raw", "The sky is"), raw
    longer = {**OLLAMA, "num_predict": 200}
    shaped = client.chat(**chat, format=SCHEMA, options=longer)
    assert keys(shaped.message.content) == {"city"}, shaped
    client.chat(**chat, tools=TOOLS, options=longer)
    refused(ollama.ResponseError, "mbedding", lambda: client.embed(model=model, input="a"))
    # ComfyUI's node reads the context of each answer, and sends it back.
    system = {"system": "Be brief.", "options": OLLAMA, "keep_alive": "-1m"}
    first = client.generate(model=model, prompt=QUESTION, context=None, **system)
    client.generate(model=model, prompt="Why?", context=first["context"], **system)
    # Times as ComfyUI, Home Assistant and Ollama's own commands spell them.
    for now in ("0m", "0s", 0):
        assert client.ps().models[0].model == model
        client.generate(model=model, prompt=QUESTION, options=OLLAMA, keep_alive=now)
        loaded(client, [])
        assert client.chat(**chat, options=OLLAMA).message.content == expected
    assert client.generate(model=model, keep_alive=0).done_reason == "unload"
    loaded(client, [])
    assert client.chat(model=model, messages=[], keep_alive="5m").done_reason == "load"
    loaded(client, [model])


def loaded(client, names):
    """Waits until these models are loaded."""
    while [running.model for running in client.ps().models] != names:
        time.sleep(0.1)


def ask(path, body):
    """Returns the status and the answer to a body."""
    request = urllib.request.Request(DEMO + path, json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def bodies():
    """Sends bodies that are written after the sources of SillyTavern, llama.vim, Open WebUI, Home
    Assistant and ComfyUI's nodes, and checks their statuses.
    """
    kept = Path(__file__).parents[3] / "tests/serve/bodies/made_up.jsonl"
    count = 0
    for record in map(json.loads, kept.read_text().splitlines()):
        if "(source)" in record["client"]:
            wanted, (status, text) = record["expect"], ask(record["path"], record["body"])
            wanted = wanted if isinstance(wanted, int) else wanted["status"]
            assert status == wanted, f"{record['client']} {record['path']}: {status} {text}"
            count += 1
    assert count > 20, count
    # llama-server's own form with SillyTavern's defaults changes no text by what it adds.
    body = {"prompt": "The sky is", "temperature": 0, "n_predict": 20, "samplers": ["temperature"]}
    text = json.loads(ask("/completion", body)[1])["content"]
    assert text == answer("--raw", "The sky is"), text


def types():
    print(run(sys.executable, Path(__file__).with_name("answers.py"), DEMO))


def llm():
    home = Path.home() / "llm"
    home.mkdir()
    (home / "extra-openai-models.yaml").write_text(
        f"- model_id: gemma\n  model_name: demo\n  api_base: {DEMO}/v1\n")
    expected = answer(QUESTION)
    options = ["--key", "none", "-o", "temperature", 0, "-o", "max_tokens", 20]
    for more in (["-n"], ["-n", "--no-stream"], []):
        said = run(binary("llm"), "-m", "gemma", *options, QUESTION, *more,
                   LLM_USER_PATH=str(home))
        assert said.strip() == expected.strip(), said
    # The demo's template shows it the last message alone.
    said = run(binary("llm"), "-c", *options, "Who are you?", LLM_USER_PATH=str(home))
    assert said.strip() == answer("Who are you?").strip(), said
    logged = json.loads(run(binary("llm"), "logs", "--json", LLM_USER_PATH=str(home)))
    talks = [entry["conversation_id"] for entry in logged]
    assert len(talks) == 2 and len(set(talks)) == 1, talks


def lm_eval():
    """Compares the scores of ten questions with those of `gemma eval` on the same texts."""
    items = [
        ("The capital of France is", " Paris", " a red shoe"), ("Two and two make", " four", " no"),
        ("The sun rises in the", " east", " oven"), ("Water freezes to", " ice", " bread"),
        ("A week has seven", " days", " cats"), ("Bees make", " honey", " war"),
        ("The opposite of hot is", " cold", " green"), ("Fish live in", " water", " books"),
        ("At night we see the", " moon", " soup"), ("Snow is", " white", " loud"),
    ]
    folder = Path.home() / "tasks"
    folder.mkdir()
    rows = [{"text": text, "choices": choices} for text, *choices in items]
    (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "ten.yaml").write_text(
        "task: ten\ndataset_path: json\ntest_split: test\noutput_type: multiple_choice\n"
        f"dataset_kwargs: {{data_files: {{test: {folder}/items.jsonl}}}}\n"
        'doc_to_text: "{{text}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: 0\n'
        'target_delimiter: ""\nmetric_list: [{metric: acc}]\n')
    arguments = f"model=demo,base_url={DEMO}/v1/completions,tokenizer_backend=remote"
    run(binary("lm-eval"), "run", "--model", "local-completions", "--tasks", "ten", "--model_args",
        arguments, "--include_path", folder, "--log_samples", "--output_path", folder / "out")
    samples = [json.loads(line) for file in (folder / "out").rglob("samples_*.jsonl")
               for line in file.read_text().splitlines()]
    assert len(samples) == len(items), samples
    right = 0
    for sample in samples:
        text, choices = sample["doc"]["text"], sample["doc"]["choices"]
        context = len(losses(text))
        sums = [-sum(losses(text + choice)[context:]) for choice in choices]
        scores = [float(part[0][0]) for part in sample["resps"]]
        assert all(map(lambda a, b: math.isclose(a, b, abs_tol=1e-4), scores, sums)), (
            text, scores, sums)
        right += sums[0] > sums[1]
    results = next((folder / "out").rglob("results_*.json")).read_text()
    accuracy = json.loads(results)["results"]["ten"]["acc,none"]
    assert math.isclose(accuracy, right / len(items)), (accuracy, right)


def losses(text):
    """Returns the negative log-likelihoods of a text's tokens by `gemma eval`."""
    file = Path.home() / "text"
    file.write_text(text)
    return json.loads(run(GEMMA, "eval", "--json", file))["nll"]


def aider():
    """Checks one answer of the demo, and one edit of a file by a fixed answer.

    A grammar with only one sentence makes the demo generate the fixed answer, because the demo
    itself cannot edit files.
    """
    project = repository()
    address = {"OPENAI_API_BASE": f"{DEMO}/v1", "OPENAI_API_KEY": "none"}
    options = ["--model", "openai/demo", "--yes-always", "--no-check-update",
               "--analytics-disable", "--no-show-model-warnings"]
    run(binary("aider"), *options, "--message", QUESTION, cwd=project, **address)
    fixed = "def add(a, b):\n    return a + b\n"
    sentence = f"hello.py\n```\n{fixed}```\n"
    settings = [{"name": "openai/demo", "edit_format": "whole", "extra_params": {
        "extra_body": {"grammar": f"start: {json.dumps(sentence)}"}}}]
    (Path.home() / "settings.yml").write_text(json.dumps(settings))
    run(binary("aider"), *options, "--model-settings-file", Path.home() / "settings.yml",
        "--message", "Mend add.", "hello.py", cwd=project, **address)
    assert (project / "hello.py").read_text() == fixed


def async_openai():
    run(binary("client-rust"), DEMO, answer(QUESTION))


def claude_code():
    agent("claude", "-p", "Hello", ANTHROPIC_BASE_URL=AGENTS, ANTHROPIC_AUTH_TOKEN="none",
          CLAUDE_CODE_MAX_OUTPUT_TOKENS="500",
          DISABLE_TELEMETRY="1", DISABLE_ERROR_REPORTING="1", DISABLE_AUTOUPDATER="1")


def codex():
    folder = Path.home() / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(
        'model = "gemma"\nmodel_provider = "gemma"\n[model_providers.gemma]\n'
        f'name = "gemma"\nbase_url = "{AGENTS}/v1"\nwire_api = "responses"\n')
    agent("codex", "exec", "Hello")


def opencode():
    # Function calls of the demo must not run commands.
    settings = {"model": "gemma/gemma", "permission": {"bash": "deny", "edit": "deny"},
                "provider": {"gemma": {
                    "npm": "@ai-sdk/openai-compatible",
                    "models": {"gemma": {"limit": {"context": 32768, "output": 500}}},
                    "options": {"baseURL": f"{AGENTS}/v1"}}}}
    agent("opencode", "run", "Hello", OPENCODE_CONFIG_CONTENT=json.dumps(settings))


def continue_cli():
    settings = Path.home() / "config.yaml"
    settings.write_text(
        "name: local\nversion: 0.0.1\nmodels:\n  - name: gemma\n    provider: openai\n"
        f"    model: gemma\n    apiBase: {AGENTS}/v1\n    apiKey: none\n")
    agent("cn", "--config", settings, "-p", "Hello", CONTINUE_TELEMETRY_ENABLED="0")


def agent(program, *arguments, **environment):
    """Runs an agent on a question. The server must not refuse a request, and the agent must print
    an answer.

    The demo does not always end its answers to long prompts. Some agents treat an answer without an
    end as an error, so their exit code counts only if the last answer ended.
    """
    log = SCRATCH / "long/said"
    before = len(log.read_text())
    done = subprocess.run(
        [binary(program), *arguments], cwd=repository(), text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **environment})
    requests = [line for line in log.read_text()[before:].splitlines() if "POST /" in line]
    ends = "\n".join(requests)
    print(f"{done.stdout[-2000:]}\n{ends}\n")
    assert requests and all(" 200 " in line for line in requests), "a request was refused"
    assert done.returncode == 0 and done.stdout.strip() or " 200 length" in requests[-1], (
        f"{program} exits with {done.returncode}")


def repository():
    """Returns a new git repository with one file, which has a mistake."""
    project = Path.home() / "project"
    project.mkdir()
    (project / "hello.py").write_text("def add(a, b):\n    return a - b\n")
    for command in (["init", "-q"], ["config", "user.name", "none"], ["add", "."],
                    ["config", "user.email", "none@localhost"], ["commit", "-q", "-m", "First"]):
        run("git", *command, cwd=project)
    return project


PIP, NPM, CARGO = "pip", "npm", "cargo"
# Name, registry, packages, function.
CLIENTS = [
    ("openai", PIP, ["openai"], openai_python),
    ("anthropic", PIP, ["anthropic"], anthropic_python),
    ("litellm", PIP, ["litellm"], litellm),
    ("langchain-openai", PIP, ["langchain-openai"], langchain_openai),
    ("langchain-anthropic", PIP, ["langchain-anthropic"], langchain_anthropic),
    ("langchain-ollama", PIP, ["langchain-ollama"], langchain_ollama),
    ("ollama", PIP, ["ollama"], ollama),
    ("bodies", PIP, [], bodies),
    ("types", PIP, ["openai", "anthropic", "ollama"], types),
    ("llm", PIP, ["llm"], llm),
    ("lm-eval", PIP, ["lm-eval[api]"], lm_eval),
    ("aider", PIP, ["aider-chat"], aider),
    ("async-openai", CARGO, ["rust"], async_openai),
    ("claude-code", NPM, ["@anthropic-ai/claude-code"], claude_code),
    ("codex", NPM, ["@openai/codex"], codex),
    ("opencode", NPM, ["opencode-ai"], opencode),
    ("continue", NPM, ["@continuedev/cli"], continue_cli),
]
BINARIES = {PIP: "bin", NPM: "node_modules/.bin", CARGO: "debug"}


def binary(program):
    return INSTALLED / program


def install(name, registry, packages):
    """Installs a client unless it is there, and returns the folder of its programs."""
    folder = STORE / name
    done = folder / "installed"
    if registry == CARGO:
        manifest = Path(__file__).parent / packages[0] / "Cargo.toml"
        run("cargo", "build", "-q", "--manifest-path", manifest, CARGO_TARGET_DIR=str(folder))
    elif not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if registry == PIP:
            run(sys.executable, "-m", "venv", folder)
            if packages:
                run(folder / "bin/pip", "install", "-q", *packages)
        else:
            run("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", folder,
                *packages)
        done.touch()
    return folder / BINARIES[registry]


def drive(name, registry, packages):
    """Installs one client and runs its function: returns one of passed, failed and skipped."""
    try:
        programs = install(name, registry, packages)
    except (AssertionError, OSError) as error:
        last = str(error).strip().splitlines()[-1]
        print(f"SKIPPED {name}: it cannot be installed: {last}", flush=True)
        return "skipped"
    home = SCRATCH / "homes" / name
    home.mkdir(parents=True)
    # LiteLLM would fetch a list of prices.
    environment = {**os.environ, "HOME": str(home), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    python = programs / "python" if registry == PIP else sys.executable
    child = subprocess.Popen(
        [python, __file__, *sys.argv[1:6], "--run", name, str(programs)], env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    said = f"no end after {PATIENCE} s"
    try:
        said = child.communicate(timeout=PATIENCE)[0]
    except subprocess.TimeoutExpired:
        pass
    finally:
        # Agents leave child processes running.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if child.returncode:
        print(f"FAILED {name}\n" + "\n".join(said.splitlines()[-40:]), flush=True)
        return "failed"
    print(f"{name}: as expected", flush=True)
    return "passed"


if __name__ == "__main__":
    GEMMA, DEMO, AGENTS = sys.argv[1:4]
    SCRATCH, STORE = map(Path, sys.argv[4:6])
    names = sys.argv[6:]
    if names[:1] == ["--run"]:
        INSTALLED = Path(names[2])
        next(function for name, *_, function in CLIENTS if name == names[1])()
        sys.exit()
    ends = [drive(*row[:3]) for row in CLIENTS if not names or row[0] in names]
    counts = ", ".join(f"{ends.count(end)} {end}" for end in ("passed", "failed", "skipped"))
    print(f"{len(ends)} clients: {counts}")
    sys.exit("failed" in ends)
