// Carries a conversation on: asks, continues, regenerates, edits, sends results of tools, stops.

import { Answer, requestFor } from "./api/answer.js";
import { stream } from "./api/event_stream.js";
import { readSettings, SettingError } from "./state/settings.js";
import { announce, byId } from "./view/element.js";

export class Chat {
  /**
   * Args:
   *   conversations: whose current one is carried on.
   *   feed: that says which endpoint the model has.
   *   thread: that shows the messages.
   *   changed: called when an answer begins or ends, and when the conversation changes.
   *   refused: called with a SettingError, before anything is sent.
   */
  constructor({ conversations, feed, thread, changed, refused }) {
    Object.assign(this, { conversations, feed, thread, changed, refused });
    this.stopper = null; // of the answer that grows
  }

  get running() {
    return this.stopper !== null;
  }

  get messages() {
    return this.conversations.current.messages;
  }

  /** Sends a text; returns whether it was taken. */
  ask(text) {
    return this.turn((messages) => messages.push({ role: "user", content: text }));
  }

  /** Replaces a message of the user and all that follows it. */
  edit(index, text) {
    return this.turn((messages) => messages.splice(index, messages.length, { role: "user", content: text }));
  }

  /** Replaces an answer and all that follows it. */
  regenerate(index) {
    return this.turn((messages) => messages.splice(index));
  }

  /** Sends what tools returned. */
  sendResults(results) {
    return this.turn((messages) => messages.push(...results.map((result) => ({ role: "tool", ...result }))));
  }

  /** Goes on with the last answer where it was cut. */
  resume() {
    return this.turn(() => {}, { resume: true });
  }

  stop() {
    this.stopper?.abort();
  }

  /** Ends the answer that grows, before another conversation is shown. */
  async ended() {
    this.stop();
    await this.turning;
  }

  turn(change, { resume = false } = {}) {
    if (this.running || !this.feed.ready) return false;
    const { chat } = this.feed.latest;
    let settings;
    try {
      settings = readSettings({ chat });
    } catch (error) {
      if (!(error instanceof SettingError)) throw error;
      this.refused(error);
      return false;
    }
    const { current } = this.conversations;
    change(current.messages);
    const system = byId("system").value.trim();
    const [path, body] = requestFor(current.messages, settings, { chat, system, resume });
    if (!resume) current.messages.push({ role: "assistant", content: "", ...(chat ? {} : { plain: true }) });
    this.turning = this.answer(current, path, body, chat);
    return true;
  }

  async answer(conversation, path, body, chat) {
    const message = conversation.messages.at(-1);
    const answer = new Answer(message, chat);
    this.stopper = new AbortController();
    this.conversations.save(conversation);
    this.thread.show(conversation.messages, true);
    this.thread.toEnd();
    this.changed();
    announce("The model answers");
    try {
      for await (const chunk of stream(path, body, this.stopper.signal)) {
        answer.add(chunk);
        this.thread.grew();
      }
    } catch (error) {
      if (error.name === "AbortError") message.finish = "stopped";
      else message.error = { message: error.message, status: error.status, code: error.code, param: error.param };
      if (error.status === 401) this.feed.poll();
    }
    this.finish(conversation, message);
  }

  finish(conversation, message) {
    const longest = this.feed.latest.max_model_len;
    if (message.stats.total >= longest) message.stats.full = longest;
    if (message.calls) message.calls = message.calls.filter(Boolean);
    this.stopper = null;
    this.conversations.save(conversation);
    this.thread.ended();
    this.changed();
    const said = message.content.length < 600 ? message.content : "The answer is complete";
    announce(message.error ? `No answer: ${message.error.message}` : message.finish === "stopped" ? "Stopped" : said);
  }
}
