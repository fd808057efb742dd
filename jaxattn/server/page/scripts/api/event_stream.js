// Reads a stream of server-sent events as JSON objects.

import { call, ServerError } from "./client.js";

/** The chunks of an answer; throws ServerError for an event that is an error, and for a cut stream. */
export async function* stream(path, body, signal) {
  const response = await call(path, { body: { ...body, stream: true, stream_options: { include_usage: true } }, signal });
  for await (const line of lines(response.body)) {
    if (!line.startsWith("data:")) continue;
    const data = line.slice(5).trim();
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message, 200, chunk.error);
    yield chunk;
  }
  throw new ServerError("The connection ended before the answer did.");
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const found = (held + value).split("\n");
      held = found.pop();
      yield* found;
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The connection broke before the answer ended.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
