// Conversations in this browser's storage, one value each, so that two tabs do not overwrite another.
//
// A conversation is {id, title, changed, messages}. A message is {role, content} with, for an
// assistant, `reasoning`, `calls` [{id, name, arguments}], `finish`, `stats`, `error` and `plain`
// (a continued text, not Markdown), and for a tool `call`, the id of the call that it answers.

import * as storage from "./storage.js";

const CHAT = "chat.";
const LONGEST_TITLE = 60;

export class Conversations {
  constructor() {
    this.current = fresh();
    this.kept = true; // whether the browser keeps what is stored
  }

  /** All that are stored, the newest first. */
  list() {
    const found = storage.names(CHAT).map((name) => storage.read(name)).filter(valid);
    return found.sort((a, b) => b.changed - a.changed);
  }

  /** Begins a new one; an empty one is not stored. */
  begin() {
    this.current = fresh();
  }

  /** Makes a stored one current; returns whether it is there. */
  open(id) {
    const found = storage.read(CHAT + id);
    if (!valid(found)) return false;
    this.current = found;
    return true;
  }

  /** Stores a conversation, the current one by default. */
  save(conversation = this.current) {
    const first = conversation.messages.find(({ role }) => role === "user");
    if (!first) return;
    conversation.title = titled(first.content);
    conversation.changed = Date.now();
    this.kept = storage.write(CHAT + conversation.id, conversation);
  }

  delete(id) {
    storage.remove(CHAT + id);
    if (this.current.id === id) this.begin();
  }

  deleteAll() {
    for (const name of storage.names(CHAT)) storage.remove(name);
    this.begin();
  }
}

const fresh = () => ({ id: identifier(), title: "", changed: Date.now(), messages: [] });

/** Random; `crypto.randomUUID` is missing without TLS. */
function identifier() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

const valid = (found) =>
  typeof found?.id === "string" && Array.isArray(found.messages) &&
  found.messages.every((message) => typeof message?.content === "string");

function titled(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > LONGEST_TITLE ? `${line.slice(0, LONGEST_TITLE - 1)}…` : line || "Untitled";
}
