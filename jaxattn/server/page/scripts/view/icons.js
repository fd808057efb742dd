// Icons on a grid of 24, drawn with strokes in the color of the text around them.

import { element, svg } from "./element.js";

const PATHS = {
  plus: "M12 5v14M5 12h14",
  sidebar: "M4 5h16v14H4zM10 5v14",
  sliders: "M4 7h9M17 7h3M4 17h3M11 17h9M15 5v4M9 15v4",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 12.5 10 17.5 19 7",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  redo: "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  chevron: "M9 6l6 6-6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  tool: "M9 4H8a2 2 0 0 0-2 2v3.5L3.5 12 6 14.5V18a2 2 0 0 0 2 2h1M15 4h1a2 2 0 0 1 2 2v3.5l2.5 2.5-2.5 2.5V18a2 2 0 0 1-2 2h-1",
  thought: "M12 3l1.9 5.1L19 10l-5.1 1.9L12 17l-1.9-5.1L5 10l5.1-1.9zM18.5 16v4M16.5 18h4",
  alert: "M12 4 2.5 20h19zM12 10v4.5M12 17.3v.2",
  forward: "M5 6l7 6-7 6zM13 6l7 6-7 6z",
  close: "M6 6l12 12M18 6 6 18",
  key: "M12 16a4.5 4.5 0 1 1-9 0 4.5 4.5 0 0 1 9 0zM10.7 12.8 20 3.5M16 7.5l3 3M13.5 10l2 2",
  light: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2.5v2M12 19.5v2M2.5 12h2M19.5 12h2M5.3 5.3l1.4 1.4M17.3 17.3l1.4 1.4M5.3 18.7l1.4-1.4M17.3 6.7l1.4-1.4",
  dark: "M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5z",
  system: "M4 5h16v11H4zM9 20h6M12 16v4",
};

/** An icon that screen readers skip. */
export function icon(name) {
  return svg(
    "svg",
    { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true", focusable: "false" },
    svg("path", { d: PATHS[name] }),
  );
}

/** A button that shows only an icon; its label is its tooltip too. */
export function iconButton(name, label, onclick, attributes = {}) {
  return element(
    "button",
    { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...attributes },
    icon(name),
  );
}

/** Gives a button of the page its icon, in front of its text. */
export function decorate(button, name) {
  button.querySelector("svg")?.remove();
  button.prepend(icon(name));
}

const CONFIRMED_MS = 1500;

/** A button that copies what `text` returns, and shows a tick for a moment. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    const done = await copied(text());
    decorate(button, done ? "check" : "alert");
    button.title = done ? "Copied" : "The browser refused to copy";
    setTimeout(() => {
      decorate(button, "copy");
      button.title = label;
    }, CONFIRMED_MS);
  });
  return button;
}

/** Whether a text is on the clipboard now; pages without TLS have the old command only. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = element("textarea", { class: "unseen", "aria-hidden": "true" });
    const focused = document.activeElement;
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    focused?.focus();
    return done;
  }
}
