// The messages of a conversation in a scrolling column that follows an answer as it grows.

import { byId } from "./element.js";
import { AnswerView, userMessage } from "./message.js";

const NEAR = 80; // pixels from the end that still count as the end

export class Thread {
  /** Args: actions: `edit(index, text)`, `regenerate(index)`, `resume()`, `sendResults(results)`. */
  constructor(actions) {
    this.actions = actions;
    this.scroller = byId("scroll");
    this.list = byId("messages");
    this.growing = null; // the view of the answer that grows
    this.frame = 0;
    this.follows = true;
    this.scroller.addEventListener("scroll", () => {
      const left = this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight;
      this.follows = left < NEAR;
      byId("jump").hidden = this.follows;
    }, { passive: true });
    byId("jump").addEventListener("click", () => this.toEnd());
  }

  /** Shows all messages; the last one as growing where `growing` is true. */
  show(messages, growing = false) {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const results = new Map(messages.filter(({ role }) => role === "tool").map(({ call, content }) => [call, content]));
    this.growing = null;
    const nodes = [];
    messages.forEach((message, index) => {
      if (message.role === "tool") return; // shown in the card of its call
      if (message.role === "user") {
        nodes.push(userMessage(message, { edit: (text) => this.actions.edit(index, text) }));
        return;
      }
      const view = new AnswerView(message, results, {
        regenerate: () => this.actions.regenerate(index),
        resume: this.actions.resume,
        sendResults: this.actions.sendResults,
      });
      const last = index === messages.length - 1;
      view.node.classList.toggle("last", last);
      view.update(growing && last);
      if (growing && last) this.growing = view;
      nodes.push(view.node);
    });
    this.list.replaceChildren(...nodes);
    this.follow();
  }

  /** The growing answer has more; it is drawn with the next frame. */
  grew() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.growing?.update(true);
      this.follow();
    });
  }

  /** The growing answer has ended. */
  ended() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.growing?.update(false);
    this.growing = null;
    this.follow();
  }

  follow() {
    if (this.follows) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  toEnd() {
    this.follows = true;
    byId("jump").hidden = true;
    this.follow();
  }
}
