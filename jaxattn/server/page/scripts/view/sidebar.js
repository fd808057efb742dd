// The list of conversations, and the buttons that show and hide the page's two side panels.

import * as storage from "../state/storage.js";
import { byId, element } from "./element.js";
import { decorate, icon, iconButton } from "./icons.js";

const WIDE = { sidebar: matchMedia("(min-width: 48rem)"), panel: matchMedia("(min-width: 75rem)") };

/** Shows the stored conversations; `actions` has `open(id)` and `remove(id)`. */
export function showConversations(conversations, actions) {
  const entries = conversations.list().map(({ id, title }) => {
    const current = id === conversations.current.id;
    return element(
      "li",
      { class: current ? "current" : null },
      element("button", { type: "button", class: "title", "aria-current": current ? "page" : null, onclick: () => actions.open(id), title, text: title }),
      iconButton("trash", `Delete “${title}”`, () => actions.remove(id)),
    );
  });
  byId("conversations").replaceChildren(...entries);
  byId("no-conversations").hidden = entries.length > 0;
  byId("delete-all").hidden = entries.length === 0;
  byId("stored").hidden = entries.length === 0;
  byId("stored").textContent = conversations.kept
    ? "Stored in this browser only."
    : "The browser's storage is full or off: new messages end with the tab.";
}

/** A side panel: beside the chat where there is room, else a drawer over it. */
export class Drawer {
  static all = [];

  constructor(name, button, iconName) {
    this.name = name;
    this.node = byId(name);
    this.button = byId(button);
    decorate(this.button, iconName);
    this.button.addEventListener("click", () => this.toggle());
    WIDE[name].addEventListener("change", () => this.set(this.initial()));
    Drawer.all.push(this);
    this.set(this.initial());
  }

  get wide() {
    return WIDE[this.name].matches;
  }

  initial() {
    return this.wide && storage.read(`open.${this.name}`, true);
  }

  toggle() {
    this.set(!this.open);
    if (this.wide) storage.write(`open.${this.name}`, this.open);
    else if (this.open) this.node.querySelector("button, summary, input")?.focus();
  }

  set(open) {
    this.open = open;
    this.node.hidden = !open;
    this.button.setAttribute("aria-expanded", String(open));
    const covered = Drawer.all.some((each) => each.open && !each.wide);
    byId("scrim").hidden = !covered;
    byId("chat").inert = covered;
  }

  /** Closes what covers the chat; returns whether something did. */
  static closeCovering() {
    const covering = Drawer.all.filter((each) => each.open && !each.wide);
    for (const each of covering) {
      each.set(false);
      each.button.focus();
    }
    return covering.length > 0;
  }
}

const THEMES = ["system", "light", "dark"];

/** The button that goes from the system's theme to the light and the dark one. */
export function themeButton() {
  const button = byId("theme");
  const show = (theme) => {
    decorate(button, theme);
    button.title = `Theme: ${theme}`;
    button.setAttribute("aria-label", button.title);
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  };
  let theme = document.documentElement.dataset.theme ?? "system";
  show(theme);
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    storage.writeText("theme", theme);
    show(theme);
  });
}

/** Makes folded sections of the panel stay as the user left them. */
export function keepFolds() {
  for (const section of document.querySelectorAll("#panel > details")) {
    section.querySelector("summary").append(icon("chevron"));
    section.open = storage.read(`fold.${section.id}`, section.open);
    section.addEventListener("toggle", () => storage.write(`fold.${section.id}`, section.open));
  }
}
