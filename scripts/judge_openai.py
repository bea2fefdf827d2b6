"""OpenAI's own client against `tandem serve` on fixtures/llama-gqa: python scripts/judge_openai.py BASE_URL KEY

What the tiny random model says is nonsense, so answers are compared with each other. Each check is one function.
"""

import asyncio
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai

BASE, KEY = sys.argv[1], sys.argv[2]
MODEL = "llama-gqa"
EXTRA = {"ignore_eos": True}
client = openai.OpenAI(base_url=f"{BASE}/v1", api_key=KEY, max_retries=0, timeout=60)
HELLO = [{"role": "user", "content": "Hello"}]


def ask(**fields):
    fields = {"model": MODEL, "messages": HELLO, "max_completion_tokens": 16, "temperature": 1, "extra_body": EXTRA} | fields
    return client.chat.completions.create(**fields)


def refused(kind, status, param, **fields):
    try:
        ask(**fields)
    except kind as error:
        assert error.status_code == status and error.param == param, (error.status_code, error.param, fields)
        return error
    raise AssertionError(f"{fields} was not refused")


def metrics():
    request = urllib.request.Request(f"{BASE}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request) as response:
        page = response.read().decode()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in page.splitlines() if line[0] != "#")}


def check_models():
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "tandem"


def check_chat():
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=16, extra_body=EXTRA)
    assert raw.headers["x-tandem-route"].startswith("cpu; ")
    answer = raw.parse()
    choice = answer.choices[0]
    assert choice.finish_reason == "length" and choice.message.role == "assistant" and choice.message.content
    usage = answer.usage
    assert usage.completion_tokens == 16 and usage.total_tokens == usage.prompt_tokens + 16
    assert usage.prompt_tokens_details.cached_tokens >= 0
    again = ask(temperature=0)
    assert ask(temperature=0).usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1


def check_multi_turn():
    answer = ask().choices[0].message
    turns = HELLO + [answer, {"role": "user", "content": [{"type": "text", "text": "And then?"}]}]
    assert ask(messages=turns).usage.prompt_tokens > ask().usage.prompt_tokens


def check_streaming():
    for n in (1, 3):
        whole = ask(seed=3, n=n)
        texts, ends, usage = [""] * n, [None] * n, None
        for chunk in ask(seed=3, n=n, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                ends[choice.index] = choice.finish_reason or ends[choice.index]
        assert texts == [c.message.content for c in whole.choices] and ends == ["length"] * n
        assert usage.completion_tokens == whole.usage.completion_tokens == 16 * n


def check_stop():
    full = ask(seed=1, max_completion_tokens=40).choices[0].message.content
    for at in range(0, len(full) - 4, 3):
        stop = full[at : at + 4]
        fields = {"seed": 1, "max_completion_tokens": 40, "stop": [stop, "never there"]}
        choice = ask(**fields).choices[0]
        assert choice.message.content == full[: full.index(stop)] and choice.finish_reason == "stop", stop
        pieces = [c.choices[0].delta.content or "" for c in ask(stream=True, **fields)]
        assert "".join(pieces) == choice.message.content


def check_logprobs():
    fields = {"logprobs": True, "top_logprobs": 4, "temperature": 0}
    answer = ask(**fields).choices[0]
    assert len(answer.logprobs.content) == 16
    for entry in answer.logprobs.content:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 4
        # Greedy: the chosen one is the likeliest.
        assert entry.top_logprobs[0].token == entry.token and entry.top_logprobs[0].logprob == entry.logprob
    said = b"".join(bytes(entry.bytes) for entry in answer.logprobs.content).decode(errors="replace")
    assert said == answer.message.content
    streamed = [e for c in ask(stream=True, **fields) if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert streamed == answer.logprobs.content
    plain = client.completions.create(model=MODEL, prompt="Once", max_tokens=8, logprobs=2, temperature=0, extra_body=EXTRA)
    logprobs = plain.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 8
    assert [max(top, key=top.get) for top in logprobs.top_logprobs] == logprobs.tokens


def check_seed_and_n():
    def text(**fields):
        return ask(**fields).choices[0].message.content

    assert text(seed=5) == text(seed=5) != text(seed=6)
    several = ask(seed=5, n=4)
    assert [c.index for c in several.choices] == [0, 1, 2, 3]
    assert len({c.message.content for c in several.choices}) == 4
    assert several.choices[1].message.content == text(seed=6)


def check_sampling_fields():
    plain = ask(seed=1).choices[0].message.content
    for fields in ({"top_p": 0.1}, {"presence_penalty": 2, "frequency_penalty": 2}, {"logit_bias": {"300": 100}}):
        assert ask(seed=1, max_completion_tokens=16, **fields).choices[0].message.content != plain, fields
    for fields in ({"top_k": 2}, {"min_p": 0.9}, {"repetition_penalty": 5.0}):
        assert ask(seed=1, extra_body=EXTRA | fields).choices[0].message.content != plain, fields


def check_completions():
    answer = client.completions.create(model=MODEL, prompt=["One", "Two"], n=2, max_tokens=4, temperature=0, extra_body=EXTRA)
    texts = [c.text for c in answer.choices]
    assert len(texts) == 4 and texts[0] == texts[1] and texts[2] == texts[3]
    stream = client.completions.create(model=MODEL, prompt="Two", max_tokens=4, temperature=0, stream=True, extra_body=EXTRA)
    assert "".join(c.choices[0].text for c in stream) == texts[2]


def check_errors():
    bad = openai.BadRequestError
    refused(bad, 400, "messages", messages=[])
    refused(bad, 400, "messages[0].role", messages=[{"role": "wizard", "content": "x"}])
    refused(bad, 400, "tools", tools=[{"type": "function", "function": {"name": "f"}}])
    refused(bad, 400, "response_format", response_format={"type": "json_object"})
    refused(bad, 400, "unknown", extra_body={"unknown": 1})
    refused(bad, 400, "stop", stop="x" * 100_000)
    refused(bad, 400, "n", n=1000)
    refused(bad, 400, "temperature", temperature=-1)
    refused(openai.NotFoundError, 404, "model", model="gpt-9")
    overflow = refused(bad, 400, None, messages=[{"role": "user", "content": "word " * 2000}])
    assert overflow.code == "context_length_exceeded" and "512" in str(overflow)
    for stream in (False, True):
        refused(bad, 400, None, max_completion_tokens=5000, stream=stream)
    try:
        client.with_options(api_key="wrong").models.list()
        raise AssertionError("a wrong key was let in")
    except openai.AuthenticationError as error:
        assert error.code == "invalid_api_key"


def check_cancellation():
    before = metrics()['tandem_requests_total{outcome="cancelled"}']
    stream = ask(stream=True, n=32, max_completion_tokens=400)
    for _ in zip(range(3), stream):
        pass
    stream.close()
    deadline = time.monotonic() + 20
    while True:
        now = metrics()
        if now['tandem_requests_total{outcome="cancelled"}'] == before + 1 and now[f'tandem_requests_running{{model="{MODEL}",engine="cpu"}}'] == 0:
            break
        assert time.monotonic() < deadline, now
        time.sleep(0.05)
    ask()


def check_many_at_once():
    alone = [ask(seed=seed).choices[0].message.content for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda seed: ask(seed=seed).choices[0].message.content, range(8)))
    assert together == alone

    async def asynchronous():
        async with openai.AsyncOpenAI(base_url=f"{BASE}/v1", api_key=KEY, max_retries=0) as one:
            fields = {"model": MODEL, "messages": HELLO, "max_tokens": 16, "temperature": 1, "extra_body": EXTRA}
            calls = [one.chat.completions.create(seed=seed, **fields) for seed in range(8)]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*calls)]

    assert asyncio.run(asynchronous()) == alone


for name, check in list(globals().items()):
    if name.startswith("check_"):
        check()
        print("ok", name.removeprefix("check_"))
