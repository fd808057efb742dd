// What the page shows instead of messages: suggestions, a model that loads, a key that is needed.

import { apiKey, setApiKey } from "../api/client.js";
import { byId, counted, element, sized } from "./element.js";
import { icon } from "./icons.js";

const QUESTIONS = [
  ["Explain an idea", "Explain in five sentences how a paged key-value cache works."],
  ["Write code", "Write a Python function that merges overlapping intervals, with a docstring and an example."],
  ["Compare in a table", "Compare multi-head latent attention and grouped-query attention in a table: cache size, compute, quality."],
  ["Edit a text", "Rewrite this sentence in plain English: The utilization of the aforementioned methodology is recommended."],
];
const BEGINNINGS = [
  ["A function", "def fibonacci(n):\n"],
  ["A class", "class Stack:\n    def __init__(self):\n"],
  ["Imports", "import "],
  ["A test", "def test_addition():\n    assert "],
];

export class Welcome {
  /** Args: fill: puts a suggestion into the composer. retry: asks the server again. */
  constructor({ fill, retry }) {
    this.node = byId("welcome");
    this.fill = fill;
    this.retry = retry;
    this.shown = "";
  }

  /** Shows what fits the server's state; `empty` says whether the conversation has no message. */
  update(feed, empty) {
    const kind = kindOf(feed, empty);
    this.node.hidden = kind === null;
    byId("messages").hidden = empty || kind !== null;
    const shown = `${kind} ${feed.latest?.chat} ${feed.latest?.model}`;
    if (shown !== this.shown) {
      this.shown = shown;
      this.node.replaceChildren(...(kind === null ? [] : this[kind](feed)));
      if (kind === "key") byId("key").focus();
    }
    if (kind === "loading") this.showProgress(feed.latest);
  }

  *greeting({ latest }) {
    const { chat, model, max_model_len: longest } = latest;
    yield element("img", { src: "page/favicon.svg", alt: "", class: "mark", width: "48", height: "48" });
    yield element("h2", { text: chat ? "What can I help with?" : "Begin a text" });
    yield element("p", { class: "lead" }, chat
      ? `${model} answers, with a context of ${counted(longest)} tokens.`
      : "This model has no chat template, so it continues what you write.");
    yield element("div", { class: "suggestions" }, ...(chat ? QUESTIONS : BEGINNINGS).map(([title, text]) =>
      element("button", { type: "button", class: "suggestion", onclick: () => this.fill(text) },
        element("strong", { text: title }),
        element("span", { class: chat ? null : "mono", text }))));
  }

  *loading({ latest }) {
    yield element("img", { src: "page/favicon.svg", alt: "", class: "mark busy", width: "48", height: "48" });
    yield element("h2", {}, "Loading ", element("span", { class: "name", text: latest.model }));
    yield element("p", { class: "lead", id: "elapsed" });
    yield element("ul", { id: "startup", class: "startup card" });
  }

  /** The start's stages; executables share one line, since each takes a moment only. */
  showProgress({ startup }) {
    const seconds = Math.round(startup.seconds);
    byId("elapsed").textContent = `${seconds} s so far. The page is ready as soon as the model is.`;
    const moving = startup.tasks.filter((task) => task.bytes);
    const compiling = startup.tasks.filter((task) => !task.bytes);
    const lines = moving.map(({ name, done, of }) => stage(capital(name), `${sized(done)} of ${sized(of)}`, of ? done / of : null));
    if (compiling.length) {
      const open = compiling.filter(({ done, of }) => done < of);
      const now = open.length ? `, now ${open[0].name.replace(/^compiling /, "")}` : "";
      const ended = compiling.length - open.length;
      lines.unshift(stage("Compiling", `${ended} of ${compiling.length} executables${now}`, open.length ? null : 1));
    }
    if (!lines.length) lines.push(stage("Reading the model's files", "", null));
    else if (lines.every((line) => line.dataset.done)) lines.push(stage("Warming up", "", null));
    byId("startup").replaceChildren(...lines);
  }

  *key() {
    yield element("div", { class: "mark lock" }, icon("key"));
    yield element("h2", { text: "This server requires an API key" });
    yield element("p", { class: "lead", text: "The key stays in this tab and is sent only to this server." });
    const field = element("input", { id: "key", type: "password", autocomplete: "off", required: true, "aria-label": "API key", placeholder: "API key" });
    const form = element("form", { class: "key" }, field, element("button", { type: "submit", class: "primary", text: "Use key" }));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      setApiKey(field.value.trim());
      this.shown = "";
      this.retry();
    });
    yield form;
    if (apiKey()) yield element("p", { class: "problem", role: "alert", text: "The server rejected this key." });
  }

  *connection() {
    yield element("div", { class: "mark lock" }, icon("alert"));
    yield element("h2", { text: "The server does not respond" });
    yield element("p", { class: "lead", text: "It may have stopped. The page tries again every second." });
  }
}

/** Which of the methods of Welcome shows the state, or null where messages are shown. */
function kindOf({ latest, problem }, empty) {
  if (problem === "key") return "key";
  if (problem === "connection") return empty ? "connection" : null;
  if (latest.phase === "starting") return "loading";
  return empty ? "greeting" : null;
}

function stage(title, said, share) {
  const bar = element("progress", { max: "1", value: share, "aria-label": title });
  return element(
    "li",
    { "data-done": share === 1 ? "true" : null },
    element("div", {}, element("span", { text: title }), element("span", { class: "meta", text: said })),
    bar,
  );
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);
