// Polls /stats, and tells its listeners what it says or why there is no answer.

import { call } from "./client.js";

const SHOWN_MS = 1000;
const HIDDEN_MS = 5000;

/** The server's state as it was last heard of. */
export class StatsFeed {
  constructor() {
    this.listeners = [];
    this.latest = null;
    this.problem = null; // null, "key" or "connection"
    this.timer = 0;
  }

  get ready() {
    return this.problem === null && this.latest?.phase === "ready";
  }

  listen(listener) {
    this.listeners.push(listener);
  }

  /** Asks now, and from then on at intervals. */
  async poll() {
    clearTimeout(this.timer);
    const asked = (this.asked = Symbol("poll"));
    let latest = null;
    let problem = null;
    try {
      latest = await (await call("stats")).json();
    } catch (error) {
      problem = error.status === 401 ? "key" : "connection";
    }
    if (asked !== this.asked) return; // a later poll answers
    this.latest = latest ?? this.latest;
    this.problem = problem;
    for (const listener of this.listeners) listener(this);
    this.timer = setTimeout(() => this.poll(), document.hidden ? HIDDEN_MS : SHOWN_MS);
  }
}
