"use strict";

const $ = id => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

/** What was said so far, as the API takes it. */
let turns = [];
/** Stops the answer under way; null while none is. */
let running = null;

/** An element with a class, a text and children. */
function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  element.className = className;
  element.append(...children);
  return element;
}

function ask(path, options = {}) {
  const key = $("key").value;
  const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
  return fetch(path, { ...options, headers });
}

// The conversation.

function atEnd() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}

/** Does what may make the log longer, and stays at its end if that is where the reader is. */
function growing(change) {
  const follow = atEnd();
  change();
  if (follow) $("log").scrollTop = $("log").scrollHeight;
}

function article(role, name, text) {
  const body = make("div", "body", text);
  const element = make("article", role, make("div", "role", name), body);
  $("empty").hidden = true;
  $("log").append(element);
  $("log").scrollTop = $("log").scrollHeight;
  return { element, body };
}

/** Shows figures below an answer; each is a name and a value, and stands there once. */
function figures(element, values) {
  const list = element.querySelector(".figures") ?? element.appendChild(make("dl", "figures"));
  for (const [name, value] of Object.entries(values)) {
    if (value == null) continue;
    list.querySelector(`[data-figure="${name}"]`)?.remove();
    const figure = make("div", "", make("dt", "", name), make("dd", "", value));
    figure.dataset.figure = name;
    list.append(figure);
  }
}

/** Text whose fenced parts are code. */
function render(body, text) {
  const parts = text.split(/^```[^\n]*\n?/m);
  if (parts.length < 3) return;
  body.replaceChildren(...parts.map((part, i) => (i % 2 ? make("pre", "", part) : part)));
}

function request(seed) {
  const system = $("system").value.trim();
  const body = {
    model: $("model").value || undefined,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns],
    stream: true,
    stream_options: { include_usage: true },
  };
  if ($("engine").value) body.engine = $("engine").value;
  for (const name of NUMBERS) if ($(name).value !== "") body[name] = Number($(name).value);
  body.seed ??= seed;
  return body;
}

/** Yields the JSON of each event of a stream. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
  }
}

async function answer() {
  const mine = turns;
  const control = (running = new AbortController());
  const body = request(Math.floor(Math.random() * 2 ** 32));
  const { element, body: shown } = article("assistant", body.model ?? "answer", "");
  element.setAttribute("aria-busy", "true");
  $("send").textContent = "Stop";
  $("send").className = "stop";
  let [text, end, usage, complete] = ["", null, null, false];
  try {
    const response = await ask("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
      signal: control.signal,
    });
    if (!response.ok) throw new Error(await why(response));
    const route = response.headers.get("x-tandem-route");
    if (route) growing(() => figures(element, { route: route.replace("; ", ": ") }));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      for (const choice of event.choices) {
        text += choice.delta.content ?? "";
        end = choice.tandem ?? end;
      }
      growing(() => (shown.textContent = text));
    }
    complete = end != null;
    if (!complete) throw new Error("the connection broke off");
  } catch (error) {
    if (error.name === "AbortError") growing(() => figures(element, { end: "stopped" }));
    else growing(() => fail(element, error.message));
  }
  growing(() => {
    element.setAttribute("aria-busy", "false");
    render(shown, text);
    if (complete && usage) figures(element, measured(end, usage, body.seed));
  });
  if (running === control) {
    running = null;
    $("send").textContent = "Send";
    $("send").className = "";
  }
  // What was not answered was not said.
  if (text) mine.push({ role: "assistant", content: text });
  else mine.pop();
}

function measured({ route, timing, reason }, usage, seed) {
  const count = usage.completion_tokens;
  const rate = timing.decode && count > 1 ? `${((count - 1) / timing.decode).toFixed(1)} tok/s` : "unknown";
  return {
    route: `${route.engine}: ${route.reason}`,
    ttft: timing.ttft == null ? "unknown" : `${(timing.ttft * 1000).toFixed(0)} ms`,
    speed: rate,
    tokens: String(count),
    prompt: String(usage.prompt_tokens),
    cached: String(usage.prompt_tokens_details?.cached_tokens ?? "unknown"),
    end: reason,
    seed: String(seed),
  };
}

async function why(response) {
  const error = (await response.json().catch(() => null))?.error;
  if (response.status === 401) {
    $("settings").open = true;
    $("key").focus();
  }
  return error?.message ?? `the server answered with status ${response.status}`;
}

function fail(element, message) {
  const failure = make("p", "failure", message);
  failure.setAttribute("role", "alert");
  element.append(failure);
}

function fit() {
  $("text").style.height = "auto";
  $("text").style.height = `${$("text").scrollHeight + 2}px`;
}

$("form").addEventListener("submit", event => {
  event.preventDefault();
  if (running) return running.abort();
  const text = $("text").value.trim();
  if (!text) return;
  const wrong = NUMBERS.map($).find(input => !input.checkValidity());
  if (wrong) {
    $("settings").open = true;
    return wrong.reportValidity();
  }
  $("text").value = "";
  fit();
  turns.push({ role: "user", content: text });
  article("user", "you", text);
  answer();
});

$("text").addEventListener("input", fit);
$("text").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) $("form").requestSubmit();
  }
});

document.addEventListener("keydown", event => {
  if (event.key === "Escape") running?.abort();
});

$("reset").addEventListener("click", () => {
  running?.abort();
  turns = [];
  $("log").replaceChildren($("empty"));
  $("empty").hidden = false;
  $("text").focus();
});

// The live view.

/** The models of the last look, by name, each with its engines; and as text, to see whether anything changed. */
let [models, looked] = [new Map(), ""];

/** Puts names into a select and keeps what was chosen, if it is still there. */
function offer(select, names) {
  const now = [...select.options].map(option => option.value);
  if (now.length === names.length && now.every((name, i) => name === names[i])) return;
  const chosen = select.value;
  select.replaceChildren(...names.map(name => new Option(name || "auto", name)));
  if (names.includes(chosen)) select.value = chosen;
}

function offerEngines() {
  const engines = models.get($("model").value) ?? [];
  offer($("engine"), ["", ...engines.map(engine => engine.engine)]);
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB"];
  const power = Math.min(3, Math.floor(Math.log2(Math.max(1, count)) / 10));
  return `${(count / 1024 ** power).toFixed(power && count / 1024 ** power < 10 ? 1 : 0)} ${units[power]}`;
}

function pairs(list, values) {
  const nodes = Object.entries(values).map(([name, value]) => [make("dt", "", name), make("dd", "", value)]);
  list.replaceChildren(...nodes.flat());
}

function card(model, engine) {
  const name = models.size > 1 ? `${model} on ${engine.engine}` : engine.engine;
  const state = make("span", engine.state, engine.state);
  const element = make("section", "engine", make("h2", "", name, state));
  if (engine.device) element.append(make("p", "", engine.device));
  const counts = make("dl", "counts");
  for (const [name, value] of [["running", engine.running], ["waiting", engine.waiting], ["restarts", engine.restarts]])
    counts.append(make("div", "", make("dt", "", name), make("dd", "", String(value ?? "unknown"))));
  element.append(counts);
  if (engine.kv_limit_bytes) {
    const meter = make("meter");
    [meter.max, meter.value] = [engine.kv_limit_bytes, engine.kv_used_bytes];
    meter.setAttribute("aria-label", "KV cache in use");
    const kept = engine.prefix_tokens ? `, ${engine.prefix_tokens.toLocaleString("en")} tokens kept for later` : "";
    const used = `KV ${bytes(engine.kv_used_bytes)} of ${bytes(engine.kv_limit_bytes)}${kept}`;
    element.append(make("p", "", used), meter);
  }
  if (engine.last_error) element.append(make("p", "", `last error: ${engine.last_error}`));
  return element;
}

function state(word, className) {
  // A status is read out when it changes, so it is written only then.
  if ($("state").textContent !== word) $("state").textContent = word;
  $("state").className = className;
}

async function health() {
  try {
    const seen = await (await fetch("health")).json();
    state(seen.status, seen.status === "ok" ? "ok" : "bad");
    if (looked === (looked = JSON.stringify(seen.models))) return;
    models = new Map(seen.models.map(model => [model.id, model.engines]));
    $("engines").replaceChildren(...seen.models.flatMap(model => model.engines.map(engine => card(model.id, engine))));
    offerEngines();
  } catch {
    state("no answer", "bad");
  }
}

/** The sum of a counter over all its labels. */
function total(page, name) {
  const lines = page.split("\n").filter(line => line.startsWith(name + "{") || line.startsWith(name + " "));
  return lines.reduce((sum, line) => sum + Number(line.slice(line.lastIndexOf(" "))), 0);
}

async function totals() {
  const response = await ask("metrics").catch(() => null);
  if (!response?.ok) return;
  const page = await response.text();
  const prompt = total(page, "tandem_prompt_tokens_total");
  const cached = total(page, "tandem_cached_tokens_total");
  pairs($("totals"), {
    requests: total(page, "tandem_requests_total").toLocaleString("en"),
    "tokens generated": total(page, "tandem_generated_tokens_total").toLocaleString("en"),
    "prompt tokens cached": prompt ? `${Math.round((100 * cached) / prompt)} %` : "unknown",
  });
}

async function offerModels() {
  const response = await ask("v1/models").catch(() => null);
  if (response?.status === 401) return state("the server wants its key", "bad");
  if (!response?.ok) return;
  offer($("model"), (await response.json()).data.map(model => model.id));
  offerEngines();
}

async function look() {
  if (document.hidden) return;
  await Promise.all([health(), totals(), $("model").options.length ? null : offerModels()]);
}

$("model").addEventListener("change", offerEngines);
$("key").addEventListener("change", () => offerModels().then(look));
if (matchMedia("(max-width: 56rem)").matches) $("live").open = $("settings").open = false;
document.addEventListener("visibilitychange", look);
offerModels().then(look);
setInterval(look, 1500);
