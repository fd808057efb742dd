// Shows a call that the model made, and a field for the result that goes back to it.

import { codeBlock } from "../markdown/render.js";
import { element } from "./element.js";
import { icon } from "./icons.js";

const LONGEST_LINE = 120;

/** A folded card with the call's arguments; `result` is the text that was sent back, if any. */
export function toolCallCard(call, result, { open }) {
  return element(
    "details",
    { class: "card tool-call", open },
    element(
      "summary",
      {},
      icon("tool"),
      element("span", { class: "grow" }, "Called ", named(call)),
      icon("chevron"),
    ),
    element("div", { class: "label", text: "Arguments" }),
    codeBlock(pretty(call.arguments), "json"),
    result === undefined ? null : element("div", { class: "label", text: "Result" }),
    result === undefined ? null : codeBlock(pretty(result), isJson(result) ? "json" : ""),
  );
}

/** A form that asks for the results of calls; `send` gets [{call, name, content}]. */
export function toolResultForm(calls, send) {
  const field = (call, number) => element("textarea", {
    id: `result-${number}`, rows: "2", required: true, spellcheck: "false",
    placeholder: "What the tool returned, as text or JSON",
  });
  const fields = calls.map(field);
  const form = element(
    "form",
    { class: "card tool-result" },
    ...calls.flatMap((call, number) => [
      element("label", { for: `result-${number}` }, "Result of ", named(call)),
      fields[number],
    ]),
    element("div", { class: "buttons" }, element("button", { type: "submit", class: "primary", text: calls.length > 1 ? "Send results" : "Send result" })),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(calls.map((call, number) => ({ call: call.id, name: call.name, content: fields[number].value })));
  });
  return form;
}

/** A call in a line, so that two of one tool can be told apart. */
function named({ name, arguments: given }) {
  const line = given.replace(/\s+/g, " ").replace(/^\{ ?| ?\}$/g, "");
  const cut = line.length > LONGEST_LINE ? `${line.slice(0, LONGEST_LINE - 1)}…` : line;
  return element("span", {}, element("code", { text: name || "…" }), " ", element("span", { class: "meta mono", text: cut }));
}

const isJson = (text) => {
  try {
    return typeof JSON.parse(text) === "object";
  } catch {
    return false;
  }
};

/** JSON with indents where that loses nothing: numbers beyond 2**53 stay as they were written. */
function pretty(text) {
  if (!isJson(text) || /\d{16}/.test(text)) return text;
  return JSON.stringify(JSON.parse(text), null, 2);
}
