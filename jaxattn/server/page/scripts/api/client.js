// Calls this server's API with the key that the user gave. Paths are relative, for proxies.

const KEY = "key";

/** An error of the server, or of the way to it. `status` is 0 where the server did not answer. */
export class ServerError extends Error {
  constructor(message, status = 0, { code = null, param = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param });
  }
}

let memory = "";

/** The key of this tab; the browser forgets it with the tab. */
export function apiKey() {
  try {
    return sessionStorage.getItem(KEY) ?? memory;
  } catch {
    return memory;
  }
}

export function setApiKey(key) {
  memory = key;
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // kept in memory
  }
}

/** The response to a request; throws ServerError unless its status is 200. */
export async function call(path, { body, signal } = {}) {
  const headers = {};
  const key = apiKey();
  if (key) headers.authorization = `Bearer ${key}`;
  if (body) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not respond. It may have stopped, or the network may be down.");
  }
  if (response.ok) return response;
  let found = {};
  try {
    found = (await response.json()).error ?? {};
  } catch {
    // a proxy's page, not the server's JSON
  }
  throw new ServerError(found.message ?? `${response.status} ${response.statusText}`, response.status, found);
}
