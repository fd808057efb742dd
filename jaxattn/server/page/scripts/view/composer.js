// The field for the next message, with buttons to send it and to stop the answer.

import { byId } from "./element.js";
import { decorate } from "./icons.js";

const TALLEST = 240;

export class Composer {
  /** Args: ask: gets the text; returns whether it was taken. stop: ends the answer. */
  constructor({ ask, stop }) {
    this.field = byId("prompt");
    this.send = byId("send");
    this.stopper = byId("stop");
    this.running = false;
    this.ready = false;
    decorate(this.send, "send");
    decorate(this.stopper, "stop");
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      const text = this.field.value;
      if (this.running || !this.ready || !text.trim()) return;
      if (ask(text)) this.fill("");
    });
    this.stopper.addEventListener("click", () => {
      stop();
      this.field.focus();
    });
    this.field.addEventListener("input", () => this.fit());
    this.field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        byId("ask").requestSubmit();
      }
      if (event.key === "Escape" && this.running) stop();
    });
  }

  /** Puts a text into the field. */
  fill(text) {
    this.field.value = text;
    this.fit();
  }

  fit() {
    this.field.style.height = "auto";
    this.field.style.height = `${Math.min(this.field.scrollHeight, TALLEST)}px`;
    this.enable();
  }

  /** Says whether an answer runs, and whether the server takes requests. */
  set({ running = this.running, ready = this.ready }) {
    Object.assign(this, { running, ready });
    this.enable();
  }

  enable() {
    this.stopper.hidden = !this.running;
    this.send.hidden = this.running;
    this.send.disabled = !this.ready || !this.field.value.trim();
  }
}
