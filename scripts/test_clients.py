"""Drives a server of the bundled model with clients from their registry.

test_clients.py http://ADDRESS GEMMA        a client that is not installed is skipped, and said so
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

address, gemma = sys.argv[1:]
# LiteLLM would fetch a list of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
QUESTION = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": QUESTION}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA}
OPTIONS = {"temperature": 0, "max_tokens": 20}
expected = subprocess.run(
    [gemma, "generate", "-q", "--temp", "0", "-n", "20", QUESTION],
    stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, check=True,
).stdout
assert expected


def openai():
    from openai import BadRequestError, OpenAI

    client = OpenAI(base_url=f"{address}/v1", api_key="none")
    model = client.models.list().data[0].id
    chat = client.chat.completions
    whole = chat.create(model=model, messages=MESSAGES, **OPTIONS)
    assert whole.choices[0].message.content == expected, whole
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    usage = {"include_usage": True}
    stream = list(chat.create(
        model=model, messages=MESSAGES, stream=True, stream_options=usage, **OPTIONS))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == expected, text
    assert stream[-1].usage.completion_tokens == whole.usage.completion_tokens
    chances = chat.create(
        model=model, messages=MESSAGES, logprobs=True, top_logprobs=2, **OPTIONS)
    assert len(chances.choices[0].logprobs.content) == whole.usage.completion_tokens

    tools = [{"type": "function", "function": TOOL}]
    long = {**OPTIONS, "max_tokens": 200}
    call = chat.create(
        model=model, messages=MESSAGES, tools=tools, tool_choice="required",
        parallel_tool_calls=False, **long).choices[0]
    assert call.finish_reason == "tool_calls", call
    function = call.message.tool_calls[0].function
    assert function.name == "weather" and set(json.loads(function.arguments)) == {"city"}
    with chat.stream(
        model=model, messages=MESSAGES, tools=tools, tool_choice="required",
        parallel_tool_calls=False, **long) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0].message.tool_calls[0].function
    assert final.arguments == function.arguments
    answer = [*MESSAGES, call.message, {
        "role": "tool", "tool_call_id": call.message.tool_calls[0].id, "content": "sunny"}]
    chat.create(model=model, messages=answer, tools=tools, tool_choice="none", **OPTIONS)

    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    shaped = chat.create(model=model, messages=MESSAGES, response_format=form, **long)
    assert set(json.loads(shaped.choices[0].message.content)) == {"city"}

    responses = client.responses
    options = {"model": model, "input": QUESTION, "temperature": 0, "max_output_tokens": 20}
    assert responses.create(**options).output_text == expected
    with responses.stream(**options) as stream:
        parts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == expected
    assert "".join(parts) == expected
    raw = client.completions.create(model=model, prompt="The", max_tokens=5, temperature=0)
    assert raw.choices[0].text
    try:
        chat.create(model=model, messages=MESSAGES, frequency_penalty=1)
    except BadRequestError as error:
        assert error.param == "frequency_penalty", error
    else:
        raise AssertionError("a penalty that is not supported was taken")


def anthropic():
    from anthropic import Anthropic

    client = Anthropic(base_url=address, api_key="none")
    # Newer versions of the package know no temperature.
    options = {"model": "demo", "messages": MESSAGES, "max_tokens": 20,
               "extra_body": {"temperature": 0}}
    whole = client.messages.create(**options)
    assert whole.content[0].text == expected and whole.stop_reason == "end_turn", whole
    with client.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == expected
        final = stream.get_final_message()
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(model="demo", messages=MESSAGES).input_tokens
    assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    tool = {"name": "weather", "input_schema": SCHEMA}
    call = client.messages.create(**{**options, "max_tokens": 200}, tools=[tool],
                                  tool_choice={"type": "any"})
    assert call.stop_reason == "tool_use" and set(call.content[0].input) == {"city"}, call


def litellm():
    import litellm

    litellm.telemetry = False
    options = {"model": "openai/demo", "api_base": f"{address}/v1", "api_key": "none",
               "messages": MESSAGES, **OPTIONS}
    assert litellm.completion(**options).choices[0].message.content == expected
    stream = list(litellm.completion(
        **options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == expected
    assert any(getattr(chunk, "usage", None) for chunk in stream)


def langchain_openai():
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=f"{address}/v1", api_key="none", model="demo", **OPTIONS)
    assert model.invoke(QUESTION).content == expected
    assert "".join(chunk.content for chunk in model.stream(QUESTION)) == expected
    longer = ChatOpenAI(base_url=f"{address}/v1", api_key="none", model="demo",
                        temperature=0, max_tokens=200)
    tools = longer.bind_tools([{"type": "function", "function": TOOL}], tool_choice="weather")
    assert set(tools.invoke(QUESTION).tool_calls[0]["args"]) == {"city"}
    shaped = longer.with_structured_output({"title": "city", **SCHEMA}, method="json_schema")
    assert set(shaped.invoke(QUESTION)) == {"city"}


def llm():
    home = Path(os.environ["HOME"]) / "llm"
    home.mkdir(exist_ok=True)
    (home / "extra-openai-models.yaml").write_text(
        f"- model_id: gemma\n  model_name: demo\n  api_base: {address}/v1\n")
    command = [Path(sys.executable).parent / "llm", "-m", "gemma", "--key", "none", "-n",
               "-o", "temperature", "0", "-o", "max_tokens", "20", QUESTION]
    for more in ([], ["--no-stream"]):
        said = subprocess.run(
            [*command, *more], env={**os.environ, "LLM_USER_PATH": str(home)},
            stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, check=True).stdout
        assert said.strip() == expected.strip(), said


skipped = 0
for client in (openai, anthropic, litellm, langchain_openai, llm):
    name = client.__name__
    if importlib.util.find_spec(name) is None:
        print(f"SKIPPED {name}: it is not installed", flush=True)
        skipped += 1
        continue
    client()
    print(f"{name}: as expected", flush=True)
print(f"{5 - skipped} clients tried, {skipped} skipped")
