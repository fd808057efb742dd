// Requests for an answer, and the message that its chunks become.

/** The path and the body of the request that continues a conversation. */
export function requestFor(messages, settings, { chat, system, resume }) {
  if (!chat) {
    const last = messages.findLastIndex(({ role }) => role === "user");
    const prompt = messages.slice(last).map(({ content }) => content).join("");
    return ["v1/completions", { ...settings, prompt }];
  }
  const body = { ...settings, messages: messages.map(sent) };
  if (system) body.messages.unshift({ role: "system", content: system });
  if (resume) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  return ["v1/chat/completions", body];
}

/** A message as the API takes it. */
function sent({ role, content, reasoning, calls, call, name }) {
  if (role === "tool") return { role, content, tool_call_id: call, name };
  const found = { role, content };
  if (reasoning) found.reasoning_content = reasoning;
  if (calls?.length) {
    found.tool_calls = calls.map(({ id, name: called, arguments: given }) => (
      { id, type: "function", function: { name: called, arguments: given } }));
  }
  return found;
}

/** Collects chunks in a message. */
export class Answer {
  /** Args: message: that grows; one that was cut goes on. chat: which endpoint's chunks come. */
  constructor(message, chat) {
    this.message = message;
    this.chat = chat;
    this.began = performance.now();
    this.first = null; // when the first piece came
    this.thoughtAt = null;
    this.callsBefore = message.calls?.length ?? 0;
    this.tokensBefore = message.stats?.tokens ?? 0;
    this.thoughtBefore = message.stats?.thought ?? 0;
    message.finish = null;
    message.error = null;
    message.stats = { ...message.stats, tokens: this.tokensBefore };
  }

  add(chunk) {
    const { message } = this;
    const now = performance.now();
    if (this.first === null) this.first = now;
    const [choice] = chunk.choices;
    if (choice) {
      const delta = this.chat ? choice.delta : { content: choice.text };
      const thought = delta.reasoning_content ?? delta.reasoning;
      if (thought) this.think(thought, now);
      if (delta.content) this.write(delta.content, now);
      for (const call of delta.tool_calls ?? []) this.addCall(call, now);
      if (choice.finish_reason) message.finish = choice.finish_reason;
    }
    if (chunk.usage) this.count(chunk.usage, now);
  }

  think(text, now) {
    this.thoughtAt ??= now;
    this.message.reasoning = (this.message.reasoning ?? "") + text;
    this.message.stats.thought = this.thoughtBefore + (now - this.thoughtAt) / 1000;
  }

  write(text, now) {
    this.endThoughts(now);
    this.message.content += text;
  }

  endThoughts(now) {
    if (this.thoughtAt === null) return;
    this.message.stats.thought = this.thoughtBefore + (now - this.thoughtAt) / 1000;
    this.thoughtBefore = this.message.stats.thought;
    this.thoughtAt = null;
  }

  addCall({ index = 0, id, function: given = {} }, now) {
    this.endThoughts(now);
    const calls = (this.message.calls ??= []);
    const call = (calls[this.callsBefore + index] ??= { id: "", name: "", arguments: "" });
    if (id) call.id = id;
    if (given.name) call.name += given.name;
    if (given.arguments) call.arguments += given.arguments;
  }

  count(usage, now) {
    const seconds = (now - this.first) / 1000;
    Object.assign(this.message.stats, {
      tokens: this.tokensBefore + usage.completion_tokens,
      total: usage.total_tokens,
      first: this.first - this.began,
      rate: usage.completion_tokens > 1 && seconds > 0 ? (usage.completion_tokens - 1) / seconds : null,
    });
  }
}
