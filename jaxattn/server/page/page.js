"use strict";
// Chat with the model over this server's own API. Text is put into the page as text nodes alone.

const at = (id) => document.getElementById(id);
const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"];
const history = [];
let stopper = null;
let chat = true;
let before = null;

at("key").value = sessionStorage.getItem("key") || "";
at("key").addEventListener("change", () => sessionStorage.setItem("key", at("key").value));
at("stop").addEventListener("click", () => stopper && stopper.abort());
at("clear").addEventListener("click", () => {
  history.length = 0;
  at("messages").replaceChildren();
});
at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask(at("prompt").value);
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});

function headers() {
  const key = at("key").value;
  const given = { "content-type": "application/json" };
  if (key) given.authorization = `Bearer ${key}`;
  return given;
}

function settings() {
  const given = {};
  for (const name of SAMPLING) {
    const value = at(name).value;
    if (value !== "") given[name] = Number(value);
  }
  return given;
}

function message(kind) {
  const place = document.createElement("div");
  place.className = `message ${kind}`;
  at("messages").append(place);
  return place;
}

function write(place, text) {
  place.append(document.createTextNode(text));
  at("messages").scrollTop = at("messages").scrollHeight;
}

// One turn: the answer appears as it comes, until it ends or the stop button is pressed.
async function ask(text) {
  if (!text || stopper) return;
  at("prompt").value = "";
  write(message("user"), text);
  history.push({ role: "user", content: text });
  const system = at("system").value;
  const messages = system ? [{ role: "system", content: system }, ...history] : history;
  const body = { ...settings(), stream: true, stream_options: { include_usage: true } };
  const path = chat ? "v1/chat/completions" : "v1/completions";
  Object.assign(body, chat ? { messages } : { prompt: text });
  const place = message("assistant");
  let answer = "";
  stopper = new AbortController();
  at("stop").disabled = false;
  at("send").disabled = true;
  try {
    const began = performance.now();
    let first = null;
    for await (const chunk of events(path, body, stopper.signal)) {
      if (first === null) first = performance.now() - began;
      const choice = chunk.choices[0];
      const piece = choice ? (chat ? choice.delta.content : choice.text) || "" : "";
      answer += piece;
      write(place, piece);
      if (chunk.usage) {
        const seconds = (performance.now() - began) / 1000;
        at("said").textContent =
          `${chunk.usage.completion_tokens} tokens in ${seconds.toFixed(1)} s, ` +
          `the first after ${first.toFixed(0)} ms`;
      }
    }
  } catch (error) {
    if (error.name === "AbortError") at("said").textContent = "stopped";
    else write(message("error"), error.message);
  }
  if (answer) history.push({ role: "assistant", content: answer });
  else history.pop();
  stopper = null;
  at("stop").disabled = true;
  at("send").disabled = false;
}

// The objects of a stream of events.
async function* events(path, body, signal) {
  const response = await fetch(path, {
    method: "POST", headers: headers(), body: JSON.stringify(body), signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice(6);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

function gauge(name, { used, of }) {
  at(name).max = of;
  at(name).value = used;
  at(`${name}-said`).value = `${used} of ${of}`;
}

function mean(now, then, seconds, count) {
  const tokens = now[count] - then[count];
  return tokens > 0 ? `${((1000 * (now[seconds] - then[seconds])) / tokens).toFixed(1)} ms` : "";
}

function show(stats) {
  chat = stats.chat;
  document.title = stats.model;
  at("model").textContent = stats.model;
  at("phase").textContent = stats.phase;
  gauge("rows", stats.rows);
  gauge("pages", stats.pages);
  at("waiting").value = stats.waiting;
  if (before) {
    const [now, then] = [stats.totals, before.totals];
    const tokens = now.generated_tokens - then.generated_tokens;
    at("rate").value = (tokens / (stats.now - before.now)).toFixed(1);
    at("first").value = mean(now, then, "first_token_seconds", "first_tokens");
    at("between").value = mean(now, then, "later_token_seconds", "later_tokens");
  }
  before = stats;
  const plan = at("plan");
  plan.replaceChildren();
  for (const line of stats.plan) {
    const row = plan.insertRow();
    row.title = line.why;
    row.insertCell().append(document.createTextNode(line.name));
    const size = `${(line.bytes / 2 ** 20).toFixed(2)} MiB`;
    row.insertCell().append(document.createTextNode(size));
  }
}

async function poll() {
  try {
    const response = await fetch("stats", { headers: headers() });
    if (response.ok) show(await response.json());
    else at("phase").textContent = response.status === 401 ? "a key is needed" : "unavailable";
  } catch {
    at("phase").textContent = "no connection";
  }
  setTimeout(poll, document.hidden ? 5000 : 1000);
}

poll();
