// Shows one message: the user's text, or an answer with its thoughts, calls, end and buttons.

import { MarkdownView } from "../markdown/render.js";
import { counted, element, rated } from "./element.js";
import { copyButton, icon, iconButton } from "./icons.js";
import { toolCallCard, toolResultForm } from "./tool_call.js";

/** A user's message; `actions` has `edit(text)`. */
export function userMessage(message, actions) {
  const bubble = element("div", { class: "bubble", text: message.content });
  const tools = element(
    "div",
    { class: "actions" },
    copyButton("Copy message", () => message.content),
    iconButton("edit", "Edit message", () => editor()),
  );
  const node = element("li", { class: "message user" }, element("h2", { class: "unseen", text: "You" }), bubble, tools);

  function editor() {
    const field = element("textarea", { class: "editor", "aria-label": "Edit message", rows: "3" });
    field.value = message.content;
    const close = () => {
      form.replaceWith(bubble);
      tools.hidden = false;
      tools.querySelector("button:last-child").focus();
    };
    const form = element(
      "form",
      { class: "edit" },
      field,
      element("div", { class: "buttons" },
        element("button", { type: "button", onclick: close, text: "Cancel" }),
        element("button", { type: "submit", class: "primary", text: "Send" })),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim()) actions.edit(field.value);
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
    bubble.replaceWith(form);
    tools.hidden = true;
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }
  return node;
}

/** An answer, which may still grow. */
export class AnswerView {
  /**
   * Args:
   *   message: that is shown.
   *   results: the text that answers a call, by the call's id.
   *   actions: `regenerate()`, `resume()`, `sendResults(results)`.
   */
  constructor(message, results, actions) {
    Object.assign(this, { message, results, actions });
    this.thoughts = element("details", { class: "thoughts", hidden: true });
    this.thoughtsTitle = element("span", { class: "grow" });
    this.thoughtsText = element("div", { class: "markdown" });
    this.thoughts.append(element("summary", {}, icon("thought"), this.thoughtsTitle, icon("chevron")), this.thoughtsText);
    this.text = element("div", { class: message.plain ? "plain" : "markdown" });
    this.calls = element("div", { class: "calls" });
    this.end = element("div", { class: "end" });
    this.node = element(
      "li",
      { class: "message assistant" },
      element("h2", { class: "unseen", text: "Model" }),
      this.thoughts, this.text, this.calls, this.end,
    );
    this.markdown = new MarkdownView(this.text);
    this.thoughtsMarkdown = new MarkdownView(this.thoughtsText);
    this.shownCalls = "";
  }

  /** Shows what the message holds now; `growing` while more may come. */
  update(growing) {
    const { message } = this;
    this.node.setAttribute("aria-busy", String(growing));
    this.updateThoughts(growing);
    if (message.plain) this.text.textContent = message.content;
    else this.markdown.update(message.content);
    this.updateCalls(growing);
    this.end.replaceChildren(...(growing ? [] : this.ending()));
  }

  updateThoughts(growing) {
    const { reasoning, content, calls, stats } = this.message;
    this.thoughts.hidden = !reasoning;
    if (!reasoning) return;
    const thinking = growing && !content && !calls?.length;
    this.thoughts.classList.toggle("thinking", thinking);
    const seconds = stats?.thought;
    const time = seconds === undefined ? "" : ` for ${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
    this.thoughtsTitle.textContent = (thinking ? "Thinking" : "Thought") + time;
    if (this.thoughts.open) this.thoughtsMarkdown.update(reasoning);
    else this.thoughts.ontoggle = () => this.thoughtsMarkdown.update(this.message.reasoning);
  }

  updateCalls(growing) {
    const calls = this.message.calls ?? [];
    const shown = JSON.stringify([calls, growing]);
    if (shown === this.shownCalls) return;
    this.shownCalls = shown;
    const open = calls.filter(({ id }) => this.results.get(id) === undefined);
    this.calls.replaceChildren(...calls.map((call) =>
      toolCallCard(call, this.results.get(call.id), { open: open.includes(call) })));
    if (open.length && !growing && this.message.finish === "tool_calls") {
      this.calls.append(toolResultForm(open, this.actions.sendResults));
    }
  }

  /** What stands below a finished answer. */
  *ending() {
    const { message, actions } = this;
    const { finish, error, stats } = message;
    if (error) yield this.failure(error);
    else if (finish === "length") {
      const full = stats?.full;
      const said = full ? `The context of ${counted(full)} tokens is full` : `Cut at ${counted(stats?.tokens ?? 0)} tokens`;
      yield this.note("alert", said, full ? null : this.button("Continue", "forward", actions.resume, "resume"));
    } else if (finish === "stopped") {
      yield this.note("stop", "Stopped", message.content ? this.button("Continue", "forward", actions.resume, "resume") : null);
    }
    const said = describe(stats);
    if (error && !message.content && !said) return; // the error has a button of its own
    yield element(
      "div",
      { class: "actions" },
      message.content ? copyButton("Copy answer", () => message.content) : null,
      iconButton("redo", "Regenerate answer", actions.regenerate),
      said ? element("span", { class: "meta", text: said }) : null,
    );
  }

  note(name, text, button) {
    return element("div", { class: "note" }, icon(name), element("span", { class: "grow", text }), button);
  }

  failure(error) {
    const place = [error.status >= 400 ? error.status : null, error.param, error.code].filter(Boolean).join(" · ");
    return element(
      "div",
      { class: "note error" },
      icon("alert"),
      element("div", { class: "grow" },
        element("strong", { text: this.message.content ? "The answer is incomplete" : "No answer" }),
        element("p", { class: "message-text", text: error.message }),
        place ? element("p", { class: "meta", text: place }) : null),
      this.message.content ? this.button("Continue", "forward", this.actions.resume, "resume") : null,
      this.button(this.message.content ? "Start over" : "Retry", "redo", this.actions.regenerate, "retry"),
    );
  }

  button(text, name, onclick, kind) {
    return element("button", { type: "button", class: kind, onclick }, icon(name), text);
  }
}

/** Tokens, speed and the time to the first token, in a line. */
function describe(stats) {
  if (!stats?.tokens) return "";
  const parts = [`${counted(stats.tokens)} token${stats.tokens === 1 ? "" : "s"}`];
  if (stats.rate) parts.push(`${rated(stats.rate)} tokens/s`);
  if (stats.first !== undefined) parts.push(`first after ${stats.first < 1000 ? `${Math.round(stats.first)} ms` : `${(stats.first / 1000).toFixed(1)} s`}`);
  return parts.join(" · ");
}
