"""What OpenAI's own client makes of a server's refusals and failures: python scripts/judge_errors.py SLOW BROKEN KEYED

SLOW answers one request at a time and slowly, and refuses a third; BROKEN's engine cannot be built; KEYED wants the key
`secret` (tests/serve/errors.rs). Each check is one function.
"""

import json
import socket
import sys
import time
import urllib.request

import openai

SLOW, BROKEN, KEYED = sys.argv[1:4]
HELLO = [{"role": "user", "content": f"Say «{'word after word, ' * 12}»"}]


def client(base, **options):
    return openai.OpenAI(base_url=f"{base}/v1", **{"api_key": "none", "max_retries": 0, "timeout": 60} | options)


def ask(of, **fields):
    return of.chat.completions.create(**{"model": "tiny", "messages": HELLO} | fields)


def raised(kind, call, status=None):
    try:
        call()
    except openai.OpenAIError as error:
        assert type(error) is kind, f"{type(error).__name__} and not {kind.__name__}: {error}"
        assert status is None or error.status_code == status, error
        return error
    raise AssertionError(f"no {kind.__name__}")


def engine():
    with urllib.request.urlopen(f"{SLOW}/health") as response:
        return json.load(response)["models"][0]["engines"][0]


def idle():
    deadline = time.monotonic() + 20
    while (now := engine())["running"] or now["waiting"]:
        assert time.monotonic() < deadline, now
        time.sleep(0.02)
    return now


def check_bad_requests():
    slow = client(SLOW)
    assert raised(openai.BadRequestError, lambda: ask(slow, messages=[]), 400).param == "messages"
    assert raised(openai.BadRequestError, lambda: ask(slow, max_tokens=10**6), 400).code == "context_length_exceeded"
    raised(openai.NotFoundError, lambda: ask(slow, model="gpt-9"), 404)
    raised(openai.NotFoundError, lambda: slow.embeddings.create(model="tiny", input="x"), 404)
    too_long = [{"role": "user", "content": "x" * (17 << 20)}]
    raised(openai.APIStatusError, lambda: ask(slow, messages=too_long), 413)


def check_keys():
    raised(openai.AuthenticationError, lambda: ask(client(KEYED)), 401)
    assert ask(client(KEYED, api_key="secret")).choices[0].message.content


def check_a_full_queue_and_that_the_client_tries_again():
    streams = [ask(client(SLOW), stream=True) for _ in range(2)]
    error = raised(openai.RateLimitError, lambda: ask(client(SLOW)), 429)
    assert int(error.response.headers["retry-after"]) >= 1
    streams[0].close()
    assert ask(client(SLOW, max_retries=5), max_tokens=1).choices[0].finish_reason == "length"
    streams[1].close()
    idle()


def check_a_broken_engine():
    assert raised(openai.InternalServerError, lambda: ask(client(BROKEN)), 503).response.headers["retry-after"]


def check_a_client_that_gives_up():
    raised(openai.APITimeoutError, lambda: ask(client(SLOW, timeout=0.2)))
    assert idle()["running"] == 0


def check_a_stream_that_is_left_gives_its_memory_back():
    # A first one fills what is kept of prompts for later.
    for _ in ask(client(SLOW), stream=True, max_tokens=4):
        pass
    kept = idle()["kv_used_bytes"]
    stream = ask(client(SLOW), stream=True)
    next(iter(stream))
    assert engine()["running"] == 1
    stream.close()
    assert idle()["kv_used_bytes"] <= kept


def check_nobody_there():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    raised(openai.APIConnectionError, lambda: ask(client(f"http://127.0.0.1:{port}")))


for name, check in list(globals().items()):
    if name.startswith("check_"):
        check()
        print("ok", name.removeprefix("check_"))
